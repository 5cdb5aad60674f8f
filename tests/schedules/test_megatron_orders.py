"""Interleaved 1F1B runs as Megatron-LM's `forward_backward_pipelining_with_interleaving` does.

What that does, restated from megatron/core/pipeline_parallel/schedules.py. Each rank numbers its units of work, a
micro-batch through one model chunk, group of N micro-batches by group, within it chunk by chunk (`get_schedule_table`).
It starts with 2 (p - 1 - rank) + (v - 1) N forwards, with one chunk p - 1 - rank, then does a forward and a backward in
turn, then the backwards that are left. A forward takes what the table says; the k-th backward takes the mirrored chunk
of unit k, and of that chunk the micro-batch that has waited longest.
"""

import re
from collections import deque
from collections.abc import Iterator

import pytest

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import ScheduleError
from rota.core.placement import Placement
from rota.core.placing import interleaved
from rota.schedules.interleaved import interleaved_one_f_one_b


def megatron_order(rank: int, p: int, v: int, num_microbatches: int, group_size: int) -> Iterator[str]:
    """One rank's ops as Megatron does them; chunk c of a rank is stage c p + rank."""
    chunks: list[int] = []
    microbatches: list[int] = []
    for start in range(0, num_microbatches, group_size):
        group = range(start, min(start + group_size, num_microbatches))
        chunks += [chunk for chunk in range(v) for _ in group]
        microbatches += [*group] * v
    warmup = min(p - 1 - rank if v == 1 else 2 * (p - 1 - rank) + (v - 1) * group_size, len(chunks))
    waiting: list[deque[int]] = [deque() for _ in range(v)]
    for unit in range(len(chunks) + warmup):
        if unit < len(chunks):
            yield f"{chunks[unit] * p + rank}F{microbatches[unit]}"
            waiting[chunks[unit]].append(microbatches[unit])
        if unit >= warmup:
            chunk = v - 1 - chunks[unit - warmup]
            yield f"{chunk * p + rank}B{waiting[chunk].popleft()}"


def is_legal(p: int, num_microbatches: int, group_size: int) -> bool:
    """No group may be smaller than the pipeline is long, and none larger than the batch."""
    return p <= group_size <= num_microbatches and not 0 < num_microbatches % group_size < p


def placed(p: int, v: int) -> Placement:
    return interleaved(Costs.uniform(p * v), Cluster.uniform(p))


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("v", range(1, 5))
def test_orders_are_megatrons(p: int, v: int) -> None:
    compared = 0
    for num_microbatches in (p, p + 1, 2 * p, 2 * p + 1, 3 * p + 2, 4 * p):
        for group_size in filter(lambda n: is_legal(p, num_microbatches, n), range(1, num_microbatches + 1)):
            plan = interleaved_one_f_one_b(placed(p, v), num_microbatches, group_size)
            for rank, order in enumerate(plan.orders):
                assert list(map(str, order)) == list(megatron_order(rank, p, v, num_microbatches, group_size))
            compared += 1
    assert compared >= 12


def refused(p: int, num_microbatches: int, group_size: int) -> None:
    """It is, and by what works."""
    with pytest.raises(ScheduleError) as caught:
        interleaved_one_f_one_b(placed(p, 2), num_microbatches, group_size)
    told = re.search(r"; give (\d+)(?: or (\d+))?$", str(caught.value))
    assert told is not None
    assert f"group_size {group_size} " in str(caught.value)
    for better in filter(None, told.groups()):
        assert is_legal(p, num_microbatches, int(better))
        interleaved_one_f_one_b(placed(p, 2), num_microbatches, int(better))


@pytest.mark.parametrize("p", range(2, 6))
def test_groups_smaller_than_the_pipeline_is_long_or_larger_than_the_batch_are_refused(p: int) -> None:
    for num_microbatches in range(p, 3 * p + 2):
        for group_size in (*range(-1, num_microbatches + 2), 10 * num_microbatches):
            if not is_legal(p, num_microbatches, group_size):
                refused(p, num_microbatches, group_size)
