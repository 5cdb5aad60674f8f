"""DualPipe: micro-batches enter at both ends, so that a forward always runs beside the backward of another one.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1, and the eight steps published with it (github.com,
deepseek-ai/DualPipe). DualPipeV is one half of it, in which the middle of the pipeline becomes the turn of a V:
"Cut-in-half" (Sea AI Lab, 2025). W runs right after I, except in the last backwards, where it is postponed to fill
the drain.

    4 ranks, 8 micro-batches, all ops equally long. Ranks 3 and 2 mirror these; DualPipeV's 2 ranks do the same in a V.

    rank 0   0F0 0F2 0F4 7F1 7I1 7W1 7F3 0F6 7I3 7W3 7F5 0I0 0W0 7I5 7W5 7F7 0I2 0W2 7I7 7W7 0I4 0W4 .   0I6 0W6
    rank 1   .   1F0 6F1 1F2 6F3 1F4 6I1 6W1 6F5 1I0 1W0 1F6 6I3 6W3 6F7 1I2 1W2 6I5 6W5 1I4 1W4 6I7 1I6 6W7 1W6
"""

from __future__ import annotations

from rota.core.errors import ScheduleError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.schedules.common import count_off, require_microbatches, require_split, require_v


def dualpipe(placement: Placement, num_microbatches: int) -> Plan:
    """Two chains in opposite directions with a split backward.

    Args:
        placement: Made by `rota.bidirectional`, on an even number of ranks.
        num_microbatches: An even number, two or more per rank.

    Raises:
        ScheduleError: The placement or the number of micro-batches does not fit.
    """
    p = placement.num_ranks
    require_bidirectional("dualpipe", placement, num_microbatches, least=2 * p)
    require_split("dualpipe", placement)
    orders = []
    for rank in range(p):
        stages = (rank, 2 * p - 1 - rank)
        near = min(rank, p - 1 - rank)
        steps = _steps(near, p // 2, num_microbatches // 2)
        orders.append(count_off(placement, stages if rank == near else stages[::-1], steps, num_microbatches))
    return Plan(placement, num_microbatches, tuple(orders))


def dualpipe_v(placement: Placement, num_microbatches: int) -> Plan:
    """One half of DualPipe on a V, in PyTorch's order.

    Args:
        placement: A V: `rota.wave` with two stages per rank and a split backward.
        num_microbatches: Two or more per rank.

    Raises:
        ScheduleError: The placement or the number of micro-batches does not fit.
    """
    p = placement.num_ranks
    require_v("dualpipe_v", placement, num_microbatches)
    if num_microbatches < 2 * p:
        raise ScheduleError(
            f"dualpipe_v: {num_microbatches} micro-batches do not fill {p} ranks; give {2 * p} or more, two per rank"
        )
    orders = []
    for rank in range(p):
        steps = _steps(rank, p, num_microbatches)
        orders.append(count_off(placement, (rank, 2 * p - 1 - rank), steps, num_microbatches))
    return Plan(placement, num_microbatches, tuple(orders))


def _steps(rank: int, p: int, num_microbatches: int) -> list[str]:
    """The eight steps, for `count_off`: 0 is the stage nearer to the start of its chain, 1 the other one.

    They are for a rank of a V over `p` ranks, or of one half of a bidirectional pipeline over 2p ranks.
    """
    before, after = rank, p - 1 - rank  # the ranks on either side
    last = ["1", "0"] * (before + 1)  # the stages of the backwards after the last F; the second half postpones W
    put_off = [*last[before + 1 :], *["0"] * after]
    return [
        *["F0"] * (2 * after),
        *["F0", "F1"] * (before + 1),
        *["I1", "W1", "F1"] * after,
        *["F0", "B1", "F1", "B0"] * (num_microbatches - p - after),
        *["B1", "F1", "B0"] * after,
        *["B" + place for place in last[: before + 1]],
        *["I" + place for place in last[before + 1 :]],
        *[step for place in put_off[:after] for step in ("W" + place, "I0")],
        *["W" + place for place in put_off[after:]],
    ]


def require_bidirectional(name: str, placement: Placement, num_microbatches: int, least: int = 2) -> None:
    """Raises ScheduleError unless two opposite chains are on an even number of ranks, with even micro-batches."""
    require_microbatches(name, num_microbatches)
    p = placement.num_ranks
    if p % 2:
        raise ScheduleError(f"{name}: needs an even number of ranks, not {p}; give {_even_near(p, 2)}")
    chains = {(start + s, start + s + 1) for start in (0, p) for s in range(p - 1)}
    ranks = [(rank,) for rank in (*range(p), *reversed(range(p)))]
    homes = [placement.ranks_of(stage) for stage in placement.stages]
    if placement.stages != tuple(range(2 * p)) or set(placement.stage_edges) != chains or homes != ranks:
        raise ScheduleError(
            f"{name}: needs two chains in opposite directions, with a stage of each on every rank; place them by "
            f"rota.bidirectional(costs, cluster)"
        )
    if num_microbatches % 2 or num_microbatches < least:
        raise ScheduleError(
            f"{name}: needs an even number of micro-batches, {least} or more on {p} ranks, not {num_microbatches}; "
            f"give {_even_near(num_microbatches, least)}"
        )


def _even_near(value: int, least: int) -> str:
    """The even numbers next to an odd or too small one."""
    return " or ".join(map(str, sorted({max(value - 1, least), max(value + 1, least)})))
