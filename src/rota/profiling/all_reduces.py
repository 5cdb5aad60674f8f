"""All-reduces between processes on CPUs, of several sizes: what replicas need to sum their gradients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import torch
import torch.distributed as dist

from rota.core.cluster import AllReduceTimes
from rota.runtime.json_messages import all_gather_json

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)  # of gradients, up to 16 MiB
_SHORT = 3  # times as many of all but the largest: in some of these a thread waits for a core, which counts for much


def measure_all_reduces(repeats: int) -> tuple[AllReduceTimes, ...]:
    """Measure all-reduces by groups of the default group's processes. Collective.

    As many groups as there are processes for reduce at once, as the ranks of replicated pipelines do.

    Args:
        repeats: Number of all-reduces of the largest size; there are three times as many of the others.

    Returns:
        The median times of each size, by the number of processes in a group; of all groups the slowest process counts.
        Noise may make a larger sum the faster one, but these times never fall.
    """
    size, mine = dist.get_world_size(), dist.get_rank()
    found = []
    for together in numbers_of(size):
        apart = size // together  # processes from one of a group to its next one, as in pipelines of so many ranks
        groups = [dist.new_group([*range(first, apart * together, apart)]) for first in range(apart)]
        group = groups[mine % apart] if mine < apart * together else None
        times = all_gather_json([_times_us(group, num_bytes, _repeats(num_bytes, repeats)) for num_bytes in SIZES])
        most_us, points = 0, []
        for i, num_bytes in enumerate(SIZES):
            slowest = map(max, zip(*(of_rank[i] for of_rank in times), strict=True))
            most_us = max(most_us, round(median(slowest)))
            points.append((num_bytes, most_us))
        found.append(AllReduceTimes(together, tuple(points)))
        if group is not None:
            dist.destroy_process_group(group)
    return tuple(found)


def _repeats(num_bytes: int, repeats: int) -> int:
    return repeats if num_bytes == SIZES[-1] else _SHORT * repeats


def numbers_of(size: int) -> Iterator[int]:
    """The numbers of processes that are measured: all of them, and each power of 2 below."""
    number = 2
    while number < size:
        yield number
        number *= 2
    yield size


def _times_us(group: dist.ProcessGroup | None, num_bytes: int, repeats: int) -> list[float]:
    """Times of this process's group, after one to make the connections; 0 on a process that is in none, which waits."""
    values = torch.zeros(num_bytes // 4)
    times = []
    for _ in range(1 + repeats):
        dist.barrier()
        began_ns = time.perf_counter_ns()
        if group is not None:
            dist.all_reduce(values, group=group)
        times.append((time.perf_counter_ns() - began_ns) / 1000 if group is not None else 0.0)
    return times[1:]
