"""The costs of layers at a micro-batch size between two measured ones: each figure on a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rota.layers import INTERPOLATED, LayerCosts

_SAME = ("cuts", "edges", "contents")  # of one model, whatever the rows
_PAIRS = ("shared", "waiting_shared", "tied")


def interpolated(small: LayerCosts, large: LayerCosts, rows: int) -> LayerCosts | None:
    """The costs for a number of rows between those of `small` and `large`: times to the nearest µs, bytes rounded up.

    None where the two differ by more than their figures: in what layers share, for example.
    """
    share = (rows - small.rows) / (large.rows - small.rows)
    values: dict[str, Any] = {"rows": rows, "spread": tuple(map(max, small.spread, large.spread))}
    values["missing_cores"] = max(small.missing_cores, large.missing_cores)
    values["uncounted"] = tuple(sorted({*small.uncounted, *large.uncounted}))
    values["note"] = f"{INTERPOLATED} between {small.rows} and {large.rows} rows, {small.note}"
    for name in (field.name for field in fields(LayerCosts) if field.name not in values):
        a, b = getattr(small, name), getattr(large, name)
        if name in _SAME and a != b:
            return None
        if name in _SAME:
            values[name] = a
        elif name in _PAIRS:
            if [entry[:2] for entry in a] != [entry[:2] for entry in b]:
                return None
            sizes = _on_a_line([entry[2] for entry in a], [entry[2] for entry in b], share, up=True)
            values[name] = tuple((*entry[:2], size) for entry, size in zip(a, sizes, strict=True))
        else:
            values[name] = tuple(_on_a_line(a, b, share, up=name.endswith("_bytes")))
    return LayerCosts(**values)


def _on_a_line(a: Sequence[int], b: Sequence[int], share: float, *, up: bool) -> list[int]:
    """The figures at `share` of the way from `a` to `b`."""
    between = [x + (y - x) * share for x, y in zip(a, b, strict=True)]
    return [math.ceil(figure - 1e-6) if up else round(figure) for figure in between]
