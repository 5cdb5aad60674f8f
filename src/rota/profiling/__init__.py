"""Costs of a model's stages and links between processes, measured where the model will run."""

from rota.profiling.links import measure_link
from rota.profiling.measuring import profile, profile_here

__all__ = ["measure_link", "profile", "profile_here"]
