"""Other systems' engines: PyTorch's own pipeline engine as a second backend."""

from rota.interop.torch_engine import TorchEngine

__all__ = ["TorchEngine"]
