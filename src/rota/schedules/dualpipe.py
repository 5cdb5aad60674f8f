"""DualPipe: micro-batches enter at both ends, so that one's forward runs beside another's backward all the time.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1, and the eight steps of the program published with
it. DualPipeV is one half of it: "cut in half" (Sea AI Lab, 2025), the middle of the pipeline becomes the turn of a V.
On each rank 0 is the stage that is nearer to its chain's start, 1 the other one; B is I and W in one.

    rank 0 of 4   F0 F0 .  F0 .  F1 I1 W1 F1 …     F0 B1 F1 B0 …     B1 F1 B0 …   B1 I0 …   W I0 …   W …
    rank 1 of 4   .  F0 F1 F0 F1 F0 B1 F1 B0 …     (its own 0 is stage 1 of the first chain; ranks 2, 3 mirror 1, 0)
                  fill             pairs of F and B    drain, W of the last ones put off to fill the bubbles
"""

from __future__ import annotations

from rota.errors import ScheduleError
from rota.placement import Placement
from rota.plan import Plan
from rota.schedules.common import require_microbatches, require_split
from rota.schedules.zb_v import count_off, require_v


def dualpipe(placement: Placement, num_microbatches: int) -> Plan:
    """Two chains in opposite directions (`rota.bidirectional`) with a split backward.

    An even number of ranks, and of micro-batches, of which there are two a rank or more.
    """
    name = "dualpipe"
    require_bidirectional(name, placement, num_microbatches)
    require_split(name, placement)
    p = placement.num_ranks
    _require_enough(name, num_microbatches, 2 * p)
    orders = []
    for rank in range(p):
        stages = (rank, 2 * p - 1 - rank)
        near = min(rank, p - 1 - rank)
        steps = _steps(near, p // 2, num_microbatches // 2)
        orders.append(count_off(placement, stages if rank == near else stages[::-1], steps, num_microbatches))
    return Plan(placement, num_microbatches, tuple(orders))


def dualpipe_v(placement: Placement, num_microbatches: int) -> Plan:
    """A V (`rota.wave`, two stages a rank) with a split backward; two micro-batches a rank or more. PyTorch's order."""
    name = "dualpipe_v"
    require_v(name, placement, num_microbatches)
    p = placement.num_ranks
    _require_enough(name, num_microbatches, 2 * p)
    orders = []
    for rank in range(p):
        steps = _steps(rank, p, num_microbatches)
        orders.append(count_off(placement, (rank, 2 * p - 1 - rank), steps, num_microbatches))
    return Plan(placement, num_microbatches, tuple(orders))


def _steps(rank: int, p: int, num_microbatches: int) -> list[str]:
    """The published eight steps, of a rank in a V of `p` ranks or in one half of a bidirectional pipeline."""
    before, after = rank, p - 1 - rank  # ranks on either side
    last = ["1", "0"] * (before + 1)  # where the backwards after the last F run; the second half of them puts W off
    put_off = [*last[before + 1 :], *["0"] * after]
    return [
        *["F0"] * (2 * after),
        *["F0", "F1"] * (before + 1),
        *["I1", "W1", "F1"] * after,
        *["F0", "B1", "F1", "B0"] * (num_microbatches - p - after),
        *["B1", "F1", "B0"] * after,
        *["B" + where for where in last[: before + 1]],
        *["I" + where for where in last[before + 1 :]],
        *[step for where in put_off[:after] for step in ("W" + where, "I0")],
        *["W" + where for where in put_off[after:]],
    ]


def require_bidirectional(name: str, placement: Placement, num_microbatches: int) -> None:
    """Two chains in opposite directions over an even number of ranks; both take as many micro-batches."""
    require_microbatches(name, num_microbatches)
    p = placement.num_ranks
    if p % 2:
        near = f"{p - 1} or {p + 1}" if p > 1 else "2"
        raise ScheduleError(f"{name}: needs an even number of ranks, not {p}; give {near}")
    chains = {(start + s, start + s + 1) for start in (0, p) for s in range(p - 1)}
    ranks = [(rank,) for rank in (*range(p), *reversed(range(p)))]
    stages = placement.stages
    found = [placement.ranks_of(stage) for stage in stages]
    if stages != tuple(range(2 * p)) or set(placement.stage_edges) != chains or found != ranks:
        raise ScheduleError(
            f"{name}: needs two chains in opposite directions, a stage of each on every rank; place them by "
            f"rota.bidirectional(costs, cluster)"
        )
    if num_microbatches % 2:
        near = f"{num_microbatches - 1} or {num_microbatches + 1}" if num_microbatches > 1 else "2"
        raise ScheduleError(
            f"{name}: {num_microbatches} micro-batches cannot be shared by two directions evenly; give {near}"
        )


def _require_enough(name: str, num_microbatches: int, least: int) -> None:
    if num_microbatches < least:
        raise ScheduleError(
            f"{name}: {num_microbatches} micro-batches do not fill the pipeline; give {least} or more, two a rank"
        )
