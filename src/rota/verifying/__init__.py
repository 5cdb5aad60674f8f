"""Is the split model exact? Its loss, outputs and gradients against those of the unsplit model, and why they differ."""

from rota.verifying.report import Comparison, ParameterDifference, Verification
from rota.verifying.verification import verify

__all__ = ["Comparison", "ParameterDifference", "Verification", "verify"]
