"""Costs of a model's stages, measured where the model will run."""

from rota.profiling.measuring import profile

__all__ = ["profile"]
