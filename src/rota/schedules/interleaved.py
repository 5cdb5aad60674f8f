"""Several stages per rank, assigned in turn: the pipeline fills and drains in steps of a fraction of a rank's work.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2
(interleaved 1F1B, depth first); Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2023, section 4 (looped BFS); Qi et
al., "Zero Bubble Pipeline Parallelism", 2023, section 2 (interleaved zero bubble: W fills what is left).

    2 ranks, 4 stages, interleaved 1F1B:
    rank 0  0F0 0F1 2F0 2F1 .   2B0 0F2 2B1 …
    rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 …
"""

from __future__ import annotations

from itertools import accumulate

from rota.core.errors import ScheduleError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.stopping import look
from rota.schedules.common import alternate, num_rounds, require_chain_on, require_microbatches, require_split

_SHAPE = "rota.interleaved(costs, cluster)"


def interleaved_one_f_one_b(placement: Placement, num_microbatches: int, group_size: int | None = None) -> Plan:
    """Micro-batches go through a rank's stages in groups, a forward and a backward in turn.

    With one stage per rank this is 1F1B.

    Args:
        placement: A chain of stages with several stages per rank: `rota.interleaved`.
        num_microbatches: Any number.
        group_size: Megatron's microbatch_group_size_per_vp_stage. Default: as many groups as possible, of equal size
            where that is possible (then PyTorch's).

    Raises:
        ScheduleError: The placement is not such a chain, or `group_size` does not cut the micro-batches.
    """
    rounds = _rounds("interleaved_1f1b", placement, num_microbatches)
    groups = _groups("interleaved_1f1b", placement, num_microbatches, group_size)
    return _in_groups(placement, num_microbatches, rounds, groups, forwards_a_hop=1 if rounds == 1 else 2)


def interleaved_zero_bubble(placement: Placement, num_microbatches: int, group_size: int | None = None) -> Plan:
    """Interleaved 1F1B with half the warm-up, and W of a micro-batch `rank` rounds after its I (ZB1P in PyTorch).

    Args:
        placement: A chain of stages with several stages per rank: `rota.interleaved`, with a split backward.
        num_microbatches: Any number.
        group_size: As in `interleaved_one_f_one_b`.

    Raises:
        ScheduleError: The placement is not such a chain, or `group_size` does not cut the micro-batches.
    """
    rounds = _rounds("interleaved_zb", placement, num_microbatches)
    require_split("interleaved_zb", placement)
    groups = _groups("interleaved_zb", placement, num_microbatches, group_size)
    return _in_groups(placement, num_microbatches, rounds, groups, forwards_a_hop=1, postpones_weights=True)


def looped_bfs(placement: Placement, num_microbatches: int) -> Plan:
    """All micro-batches through a rank's first stage, then through the next; backwards in the opposite order.

    Args:
        placement: A chain of stages with several stages per rank: `rota.interleaved`.
        num_microbatches: Any number.

    Raises:
        ScheduleError: The placement is not such a chain.
    """
    rounds = _rounds("looped_bfs", placement, num_microbatches)
    p = placement.num_ranks
    orders = []
    for rank in range(p):
        look()
        forwards = [(rank + i * p, m) for i in range(rounds) for m in range(num_microbatches)]
        orders.append(alternate(placement, forwards, forwards[::-1], len(forwards)))
    return Plan(placement, num_microbatches, tuple(orders))


def _in_groups(
    placement: Placement,
    num_microbatches: int,
    rounds: int,
    groups: list[range],
    forwards_a_hop: int,
    postpones_weights: bool = False,
) -> Plan:
    """The plan whose warm-up is `forwards_a_hop` for each rank that follows, and the first group's further rounds."""
    p = placement.num_ranks
    orders = []
    for rank in range(p):
        look()
        stages = [rank + i * p for i in range(rounds)]
        forwards = [(stage, m) for batches in groups for stage in stages for m in batches]
        backwards = [(stage, m) for batches in groups for stage in reversed(stages) for m in batches]
        warmup = min(forwards_a_hop * (p - 1 - rank) + (rounds - 1) * len(groups[0]), len(forwards))
        without_weight = range(rank if postpones_weights else 0)
        orders.append(alternate(placement, forwards, backwards, warmup, without_weight))
    return Plan(placement, num_microbatches, tuple(orders))


def _rounds(name: str, placement: Placement, num_microbatches: int) -> int:
    require_microbatches(name, num_microbatches)
    rounds = num_rounds(name, placement, placement.num_ranks, _SHAPE)
    require_chain_on(name, placement, [s % placement.num_ranks for s in range(placement.num_stages)], _SHAPE)
    return rounds


def _groups(name: str, placement: Placement, num_microbatches: int, size: int | None) -> list[range]:
    """Groups of micro-batches that go through a rank's stages together, each with one or more per rank."""
    least = min(placement.num_ranks, num_microbatches)
    if size is None:
        even, larger = divmod(num_microbatches, num_microbatches // least)
        sizes = [even + 1] * larger + [even] * (num_microbatches // least - larger)  # the warm-up is for the largest
        return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    if not least <= size <= num_microbatches or 0 < num_microbatches % size < least:
        fitting = [g for g in range(least, num_microbatches + 1) if not 0 < num_microbatches % g < least]
        near = sorted(fitting, key=lambda g: abs(g - size))[:2]
        raise ScheduleError(
            f"{name}: group_size {size} does not cut {num_microbatches} micro-batches into groups of {least} or more "
            f"(with less, ranks come back to their first stage too early); give {' or '.join(map(str, near))}"
        )
    return [range(start, min(start + size, num_microbatches)) for start in range(0, num_microbatches, size)]
