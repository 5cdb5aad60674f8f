"""Is this machine fit for Rota? What it has, what its links give, and plans that run on its devices.

Its modules that read the machine need no PyTorch: where it is missing, that is a finding.
"""

from rota.diagnosis.examination import Wanted, examine, examine_launched
from rota.diagnosis.report import Finding, Report

__all__ = ["Finding", "Report", "Wanted", "examine", "examine_launched"]
