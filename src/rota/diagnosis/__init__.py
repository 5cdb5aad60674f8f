"""Is this machine fit for Rota? Its versions, its devices, the links between them, and a self-test of training.

What needs no ranks needs no PyTorch either: where it is missing, that is a finding.
"""

from rota.diagnosis.examination import examine, examine_launched
from rota.diagnosis.report import Finding, Report

__all__ = ["Finding", "Report", "examine", "examine_launched"]
