"""Feed measured timelines back: the real costs of a placement, and the best plan for them."""

from rota.calibration.best_plan import Calibration, Candidate, calibrate
from rota.calibration.measured_times import calibrated, median_us
from rota.calibration.placement_costs import costs_of
from rota.calibration.size_fit import fit_sizes

__all__ = ["Calibration", "Candidate", "calibrate", "calibrated", "costs_of", "fit_sizes", "median_us"]
