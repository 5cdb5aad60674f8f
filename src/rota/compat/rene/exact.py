"""Durations without rounding: as they are written, 1.4 as 7/5, and counted in whole parts of one unit."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

from rota.compat.rene.instruction import Instruction, ReneError


def as_written(duration: float, inst: Instruction) -> Fraction:
    """Raises ReneError for what is no number of 0 or more."""
    try:
        exact = Fraction(repr(float(duration))) if isinstance(duration, float) else Fraction(duration)
    except (TypeError, ValueError):
        exact = Fraction(-1)
    if exact < 0:
        raise ReneError(f"the duration of {inst} is {duration!r}; give a number of 0 or more")
    return exact


def in_whole_parts(durations: Sequence[Fraction]) -> tuple[list[int], int]:
    """Each as a number of parts, and how many of these are 1."""
    scale = lcm(*(duration.denominator for duration in durations))
    return [int(duration * scale) for duration in durations], scale
