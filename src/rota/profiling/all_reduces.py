"""Time of all-reduces between processes of this machine, for the sizes of a model's gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from rota.errors import PipelineError
from rota.profiling.forked import run_forked
from rota.runtime.process_group import join

_SHARES = (16, 4, 1)  # parts of the gradients that are measured: a stage has some of them
_MOST, _LEAST = 7, 3  # all-reduces of a size after the first, of which the median counts
_ENOUGH_S = 1.0  # for one size

#: By number of processes: (bytes, µs) of an all-reduce.
AllReduceTimes = dict[int, tuple[tuple[int, int], ...]]


def measure_all_reduces(
    num_ranks: int,
    num_bytes: int,
    *,
    report: Callable[[str], None] = lambda _: None,
    within_s: float | None = None,
) -> AllReduceTimes:
    """Measure all-reduces of up to `num_bytes` by 2 to `num_ranks` processes of this machine.

    As many groups as there are processes for reduce at once, as the ranks of replicated pipelines do.

    Args:
        num_ranks: Processes, 2 or more.
        num_bytes: The gradients of the whole model, 1 byte or more.
        report: Called every second with a line of text.
        within_s: Seconds after which the measurement is given up; None: no limit.

    Returns:
        By number of processes that reduce together: times in µs by size in bytes, ascending in both.

    Raises:
        PipelineError: A process fails, or time is up.
    """
    began_s = time.monotonic()

    def tick() -> None:
        report(f"measuring all-reduces of the gradients, for {time.monotonic() - began_s:.0f} s so far")

    sizes = sorted({max(num_bytes // share, 4) for share in _SHARES})
    slowest: AllReduceTimes = {}
    try:
        of_ranks = run_forked(
            num_ranks, lambda number: _measured(number, num_ranks, sizes), within_s=within_s, tick=tick
        )
    except TimeoutError as error:
        raise PipelineError(f"{error}; give a longer --time-limit") from None
    for i, together in enumerate(range(2, num_ranks + 1)):
        slowest[together] = ascending([(size, max(of[i][k] for of in of_ranks)) for k, size in enumerate(sizes)])
    return slowest


def ascending(points: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The points with times that never fall as sizes grow: noise may make a larger message the faster one."""
    most, made = 0, []
    for size, us in sorted(points):
        most = max(most, us)
        made.append((size, most))
    return tuple(made)


def _measured(number: int, num_ranks: int, sizes: list[int]) -> list[list[int]]:
    """On one process: for each number of processes that reduce together, the median time of each size."""
    join()
    rows = []
    for together in range(2, num_ranks + 1):
        apart = num_ranks // together
        groups = [dist.new_group([*range(first, apart * together, apart)]) for first in range(apart)]
        mine = groups[number % apart] if number < apart * together else None
        rows.append([_median_us(mine, size) for size in sizes])
    dist.barrier()
    return rows


def _median_us(group: dist.ProcessGroup | None, num_bytes: int) -> int:
    """The median time of this process's group; 0 on a process that is in none, which waits for the others."""
    values = torch.zeros(-(-num_bytes // 4))
    times: list[float] = []
    spent_us = torch.zeros(1)
    while len(times) <= _MOST and (len(times) <= _LEAST or spent_us.item() < 1e6 * _ENOUGH_S):
        dist.barrier()
        began_ns = time.perf_counter_ns()
        if group is not None:
            dist.all_reduce(values, group=group)
        times.append((time.perf_counter_ns() - began_ns) / 1000)
        spent_us[0] = sum(times)
        dist.all_reduce(spent_us, dist.ReduceOp.MAX)  # so that all stop at once
    return round(median(times[1:])) if group is not None else 0
