"""Which micro-batch sizes can be measured in the time that there is: decided before the first of them is measured.

A decision on the way, by how much time is left, would differ from run to run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rota.models import Stages
from rota.models.carving.copies import deep_copy
from rota.models.randomness import random_state_kept

_FORWARDS = 3.0  # a forward and a backward together take as long as so many forwards
#: Of a layer while it is measured; each repeat has one with a whole and one with a split B.
_RUNS, _RUNS_PER_REPEAT = 12, 2
_LAYER_S = 0.1  # for a layer besides its runs
_FEW_REPEATS = 3  # instead of the usual number, where there is little time


class Affordable(NamedTuple):
    """The numbers of rows to measure, in this order, and how often."""

    rows: tuple[int, ...]
    repeats: int


def affordable(
    stages: Stages,
    make_batch: Callable[[int], tuple[Any, Any]],
    rows: Sequence[int],
    repeats: int,
    seconds: float,
) -> Affordable:
    """Choose by a quick timing of forwards. Unless all sizes fit, they are measured with few repeats.

    Args:
        stages: The layers, on the CPU. Their modules are not touched.
        make_batch: Makes inputs and targets, given the number of rows.
        rows: The numbers of rows, the most important first.
        repeats: The usual number of measurements.
        seconds: About how long all of them may take.

    Returns:
        Those that fit together, in the order of their importance; if none does, the smallest.
    """
    forward_s = _forward_s(stages, make_batch, rows, seconds)
    every = _fitting(forward_s, len(stages), rows, repeats, seconds)
    if len(every.rows) == len(rows):
        return every
    some = _fitting(forward_s, len(stages), rows, min(repeats, _FEW_REPEATS), seconds)
    return some if some.rows else some._replace(rows=(min(rows),))


def _fitting(
    forward_s: dict[int, float], num_layers: int, rows: Sequence[int], repeats: int, seconds: float
) -> Affordable:
    """The sizes that fit with so many repeats. The first that is left out ends them, unless none has been taken yet."""
    taken: list[int] = []
    for count in rows:
        runs = _RUNS + _RUNS_PER_REPEAT * repeats
        needed_s = _LAYER_S * num_layers + runs * _FORWARDS * forward_s[count]
        if needed_s <= seconds:
            taken.append(count)
            seconds -= needed_s
        elif taken:
            break
    return Affordable(tuple(taken), repeats)


def _forward_s(
    stages: Stages, make_batch: Callable[[int], tuple[Any, Any]], rows: Sequence[int], seconds: float
) -> dict[int, float]:
    """Seconds of a forward through all layers, by rows; one too slow to be measured tells about those above it."""
    found: dict[int, float] = {}
    slowest: int | None = None
    copied = deep_copy(stages)
    with random_state_kept(nn.ModuleList(stages.modules)), torch.no_grad():
        for count in sorted(rows):
            if slowest is not None:
                found[count] = found[slowest] * count / slowest
                continue
            found[count] = _quickest_s(copied, make_batch(count)[0])
            if found[count] * _FORWARDS * _RUNS > seconds:
                slowest = count
    return found


def _quickest_s(stages: Stages, batch: Any) -> float:
    """The faster of two forwards after a warm-up; 0.0 if a layer fails, which measuring it says better."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    try:
        for _ in range(3):
            began_s = time.perf_counter()
            stages.run(batch)
            times.append(time.perf_counter() - began_s)
    except Exception:
        return 0.0
    finally:
        torch.set_num_threads(num_threads)
    return min(times[1:])
