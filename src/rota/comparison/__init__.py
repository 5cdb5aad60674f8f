"""Planned and measured, op by op, and where every µs of the difference in makespan comes from."""

from rota.comparison.comparing import Comparison, KindRow, OpDifference, compare
from rota.comparison.parts import Part

__all__ = ["Comparison", "KindRow", "OpDifference", "Part", "compare"]
