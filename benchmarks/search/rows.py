"""The problems on which a simple heuristic or an exact solver has beaten the search: see README.md, *gaps*."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

from rota import Cluster, Costs, Placement, interleaved, place, wave

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.tessel_shapes import tessel

SPLIT, WHOLE = (10_000, 12_000, 12_000), (10_000, 24_000)  #: µs of all stages of a rank: F I W, or F B


class Row(NamedTuple):
    """One problem."""

    name: str
    placement: Placement
    num_microbatches: int
    limit_s: float


def _pipeline(
    shape: Callable[[Costs, Cluster], Placement],
    num_ranks: int,
    per_rank: int,
    memory: float,
    spread: float = 0.0,
    times_us: tuple[int, ...] = SPLIT,
) -> Placement:
    """Equal stages, each one's times multiplied by one factor from 1 - `spread` to 1 + `spread`.

    `memory` is in what the first rank of 1F1B on one stage per rank holds: as many micro-batches as there are ranks.
    """
    chooser = Random(0)
    factors = [chooser.uniform(1 - spread, 1 + spread) for _ in range(num_ranks * per_rank)]
    columns = [[round(us / per_rank * factor) for factor in factors] for us in times_us]
    costs = Costs(*columns, activation_bytes=2)
    return shape(costs, Cluster.uniform(num_ranks, round(2 * memory * num_ranks * per_rank)))


def rows() -> list[Row]:
    """All problems, with the seconds that a search has for each."""
    return [
        Row("wave16x64", _pipeline(wave, 16, 2, 0.5), 64, 30),
        Row("wave32x128", _pipeline(wave, 32, 2, 0.75), 128, 30),
        Row("interleaved16x4x128", _pipeline(interleaved, 16, 4, 0.75, 0.3), 128, 30),
        Row("interleaved16x2x64", _pipeline(interleaved, 16, 2, 1, 0, WHOLE), 64, 30),
        Row("wave8x32", _pipeline(wave, 8, 2, 0.6, 0.3), 32, 30),
        Row("chain16x64", _pipeline(place, 16, 1, 0.6, 0.3), 64, 30),
        Row("x8x128", tessel("x", 8, 4), 128, 30),
        Row("nn8x64-6", tessel("nn", 8, 6), 64, 30),
        Row("nn8x64-3", tessel("nn", 8, 3), 64, 30),
        Row("chain64x512", _pipeline(place, 64, 1, 0.75, 0.3), 512, 30),
        Row("chain128x1024", _pipeline(place, 128, 1, 0.75, 0.3), 1024, 30),
    ]
