"""Costs of a chain's layers -> costs of the stages that they are cut into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

from rota.costs import Costs


def merge(costs: Costs, boundaries: Sequence[int]) -> Costs:
    """The costs of a chain's parts, each a stage, out of those of its layers; no part may be empty.

    Times and bytes add up, peaks do not, and what crosses a boundary is what crosses it between the two layers there.
    Raises PlacementError where the layers are no chain.
    """
    costs = costs.as_chain()
    parts = [slice(*part) for part in pairwise(boundaries)]
    merged: dict[str, Any] = {}
    for field in fields(costs):
        value = getattr(costs, field.name)
        if not isinstance(value, tuple):
            continue
        if field.name in ("boundary_bytes", "gradient_bytes"):
            merged[field.name] = tuple(value[boundary - 1] for boundary in boundaries[1:-1])
        else:
            merged[field.name] = tuple(_HOW.get(field.name, sum)(value[part]) for part in parts)
    return replace(costs, **merged)


def _sum_or_none(times: Sequence[int | None]) -> int | None:
    """A part is recomputed whole or not at all."""
    return None if None in times else sum(time for time in times if time is not None)


def _first(values: Sequence[int]) -> int:
    return values[0]


_HOW: dict[str, Callable[[Any], int | None]] = {
    "forward_peak_bytes": max,
    "backward_peak_bytes": max,
    "weight_peak_bytes": max,
    "recompute_us": _sum_or_none,
    "checkpoint_bytes": _first,
}
