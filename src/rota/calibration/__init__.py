"""Measured timelines -> what everything takes in truth, and the plan that is best then."""

from rota.calibration.costing import costs_of
from rota.calibration.measured import calibrated, median_us
from rota.calibration.replanning import Calibration, Candidate, calibrate

__all__ = ["Calibration", "Candidate", "calibrate", "calibrated", "costs_of", "median_us"]
