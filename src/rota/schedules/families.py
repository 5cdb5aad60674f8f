"""All named schedules: the placement of each, and the bubble that its paper states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from rota.core.cluster import Cluster
from rota.core.copies import with_copies, without_copies
from rota.core.costs import Costs
from rota.core.errors import PlacementError, RotaError
from rota.core.placement import Placement
from rota.core.placing import bidirectional, interleaved, place, wave
from rota.core.plan import Plan
from rota.core.stopping import look
from rota.schedules.chimera import chimera
from rota.schedules.controllable_memory import v_half, v_min
from rota.schedules.dualpipe import dualpipe, dualpipe_v
from rota.schedules.gpipe import forward_only, gpipe
from rota.schedules.hanayo import hanayo
from rota.schedules.interleaved import interleaved_one_f_one_b, interleaved_zero_bubble, looped_bfs
from rota.schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b, seq1f1b
from rota.schedules.varuna import varuna
from rota.schedules.zero_bubble import zb_h1, zb_h2, zb_v


class Sizes(NamedTuple):
    """p ranks, v stages per rank, and a rank's F, whole backward and W time per micro-batch in µs."""

    p: int
    v: int
    f: float
    b: float
    w: float


class Bubble(NamedTuple):
    """The idle time of a rank in a step without transfers, as published or as `docs/schedules.md` says."""

    text: str  #: the formula
    us: Callable[[Sizes], float]  #: its value in µs


@dataclass(frozen=True, slots=True)
class Family:
    """A named schedule: `family(placement, num_microbatches)` makes its plan.

    Attributes:
        name: As on the command line.
        summary: A few words, for a list.
        schedule: Makes the plan from a placement and a number of micro-batches.
        place: Makes the placement from costs with `stages_per_rank` stages per rank, and a cluster.
        backward: "whole" (B), "split" (I and W) or "any".
        stages_per_rank: Stages per rank.
        recomputes: Whether all stages but the last run their forwards again before the backward.
        bubble: The published idle time; None without a formula.
        of_span: Whether `bubble` counts the idle time within the span; else within the makespan.
    """

    name: str
    summary: str
    schedule: Callable[[Placement, int], Plan]
    place: Callable[[Costs, Cluster], Placement]
    backward: Literal["whole", "split", "any"] = "any"
    stages_per_rank: int = 1
    recomputes: bool = False
    bubble: Bubble | None = None
    of_span: bool = False

    def __call__(self, placement: Placement, num_microbatches: int) -> Plan:
        """The family's plan for the placement and the number of micro-batches, copies to and from hosts included."""
        return with_copies(self.schedule(without_copies(placement), num_microbatches), placement)

    def costs_from(self, costs: Costs) -> Costs:
        """A chain of one stage per rank, cut and split as in this family's paper.

        Args:
            costs: One stage per rank.

        Returns:
            Costs with `stages_per_rank` stages per rank: each rank's time and memory is divided evenly among its
            stages, and their sum stays. A whole backward that must be split is halved; one that must be whole is
            joined.

        Raises:
            PlacementError: The costs' edges are not a chain, or a rank has fewer µs than stages to share them.
        """
        costs = costs.as_chain()
        # As in the paper: a backward that need not be split is whole.
        costs = _joined(costs) if self.backward == "any" else self.adapted(costs)
        return costs if self.stages_per_rank == 1 else _cut(costs, self.stages_per_rank, self.place is wave)

    def adapted(self, costs: Costs) -> Costs:
        """The same stages with their backward halved or joined, or forwards recomputed, as this family needs."""
        if self.recomputes and costs.recompute_us is None:
            sent = _largest(costs.boundary_bytes)
            kept = tuple(min(sent, held) for held in costs.activation_bytes)  # the input, to start again from
            copied = tuple(map(min, costs.offload_bytes, kept))
            recomputed = (*costs.forward_us[:-1], None)
            costs = replace(costs, recompute_us=recomputed, checkpoint_bytes=kept, offload_bytes=copied)
        if self.backward == "any":
            return costs
        return _joined(costs) if self.backward == "whole" else costs.with_split_backward()


def _in_turn(costs: Costs, cluster: Cluster) -> Placement:
    """Any number of stages, stage s on rank s modulo the number of ranks."""
    return place(costs, cluster, [stage % cluster.num_ranks for stage in range(costs.num_stages)])


def _in_turn_forward(costs: Costs, cluster: Cluster) -> Placement:
    return _in_turn(costs, cluster).forward_only()


def _joined(costs: Costs) -> Costs:
    if costs.weight_us is None:
        return costs
    whole = tuple(i + w for i, w in zip(costs.backward_us, costs.weight_us, strict=True))
    return replace(costs, backward_us=whole, weight_us=None)


def _cut(costs: Costs, parts: int, up_and_down: bool) -> Costs:
    """`parts` stages per rank; what a rank has is divided evenly among its stages."""
    n = costs.num_stages
    ranks = [s % n if not up_and_down or s // n % 2 == 0 else n - 1 - s % n for s in range(n * parts)]
    values: dict[str, Any] = {}
    for name, column in asdict(costs).items():
        if column is None or name in _NOT_PER_STAGE:
            continue
        for rank, size in enumerate(column):
            if name.endswith("_us") and name != "spread_us" and 0 < (size or 0) < parts:
                raise PlacementError(
                    f"{name} of rank {rank} is {size}, which {parts} stages cannot share; give {parts} µs or more"
                )
        sizes = [column[rank] for rank in ranks]
        values[name] = tuple(None if size is None else (size + s // n) // parts for s, size in enumerate(sizes))
    values["boundary_bytes"] = _largest(costs.boundary_bytes)
    if costs.gradient_bytes is not None:
        values["gradient_bytes"] = _largest(costs.gradient_bytes)
    return replace(costs, **values)


def _largest(sizes: tuple[int, ...] | int) -> int:
    return sizes if isinstance(sizes, int) else max(sizes, default=0)


_NOT_PER_STAGE = ("boundary_bytes", "gradient_bytes", "edges", "note", "microbatch_rows")

_1F1B = Bubble("(p−1)(F+B)", lambda s: (s.p - 1) * (s.f + s.b))
_INTERLEAVED = Bubble("(p−1)(F+B)/v", lambda s: (s.p - 1) * (s.f + s.b) / s.v)


def _zb(hops: int) -> Bubble:
    times = "" if hops == 1 else str(hops)
    return Bubble(f"(p−1)(F+I−{times}W)", lambda s: max((s.p - 1) * (s.f + s.b - (1 + hops) * s.w), 0))


_CHIMERA = Bubble("(p−2)B, m=p", lambda s: (s.p - 2) * s.b)
_DUALPIPE = Bubble("(p/2−1)(F+I−W)", lambda s: (s.p / 2 - 1) * (s.f + s.b - 2 * s.w))
_DUALPIPE_V = Bubble("(p−1)(F+I−W)/v", lambda s: (s.p - 1) * (s.f + s.b - 2 * s.w) / s.v)
_HANAYO = Bubble("2(p−1)B/v", lambda s: 2 * (s.p - 1) * s.b / s.v)
_NONE = Bubble("0 if F=I=W", lambda _: 0)

FAMILIES = (
    Family("gpipe", "all forwards, then all backwards", gpipe, _in_turn, bubble=_1F1B),
    Family(
        "1f1b",
        "alternates one forward and one backward; keeps the activations of only a few micro-batches",
        one_f_one_b,
        _in_turn,
        bubble=_1F1B,
    ),
    Family(
        "eager_1f1b", "1f1b with twice the warm-up, which hides transfers", eager_one_f_one_b, _in_turn, bubble=_1F1B
    ),
    Family(
        "interleaved_1f1b",
        "1f1b with several stages per rank; less bubble, more transfers",
        interleaved_one_f_one_b,
        interleaved,
        stages_per_rank=2,
        bubble=_INTERLEAVED,
    ),
    Family(
        "looped_bfs",
        "several stages per rank; a rank runs all micro-batches through one stage before the next",
        looped_bfs,
        interleaved,
        stages_per_rank=2,
        bubble=_INTERLEAVED,
    ),
    Family(
        "zb_h1",
        "splits the backward; W fills the bubble; same memory as 1f1b",
        zb_h1,
        place,
        backward="split",
        bubble=_zb(1),
    ),
    Family(
        "zb_h2",
        "like zb_h1 with up to twice the memory; no bubble if F = I = W",
        zb_h2,
        place,
        backward="split",
        bubble=_zb(2),
        of_span=True,
    ),
    Family(
        "interleaved_zb",
        "interleaved_1f1b with a split backward",
        interleaved_zero_bubble,
        interleaved,
        backward="split",
        stages_per_rank=2,
    ),
    Family(
        "zb_v",
        "stages down the ranks and back up; no bubble if F = I = W",
        zb_v,
        wave,
        backward="split",
        stages_per_rank=2,
        bubble=_NONE,
        of_span=True,
    ),
    Family(
        "v_half", "like zb_v, with about half the memory of 1f1b", v_half, wave, backward="split", stages_per_rank=2
    ),
    Family(
        "v_min", "like zb_v, with about a third of the memory of 1f1b", v_min, wave, backward="split", stages_per_rank=2
    ),
    Family(
        "dualpipe_v",
        "dualpipe cut in half, with one copy of the weights: stages down the ranks and back up",
        dualpipe_v,
        wave,
        backward="split",
        stages_per_rank=2,
        bubble=_DUALPIPE_V,
    ),
    Family("dualpipe", "chimera with a split backward", dualpipe, bidirectional, backward="split", bubble=_DUALPIPE),
    Family(
        "chimera",
        "micro-batches enter at both ends; holds the weights twice",
        chimera,
        bidirectional,
        backward="whole",
        bubble=_CHIMERA,
    ),
    Family(
        "hanayo",
        "stages down the ranks and back up, in one or more waves",
        hanayo,
        wave,
        stages_per_rank=2,
        bubble=_HANAYO,
    ),
    Family(
        "varuna",
        "recomputes each forward before its backward; least memory",
        varuna,
        place,
        backward="whole",
        recomputes=True,
    ),
    Family("seq1f1b", "1f1b for micro-batches that are chunks of samples (--chunks)", seq1f1b, _in_turn),
    Family("forward_only", "forward passes only, for inference", forward_only, _in_turn_forward),
)

#: By the names that the command line uses.
NAMED: Mapping[str, Family] = {family.name: family for family in FAMILIES}


def named_plans(
    placement: Placement,
    num_microbatches: int,
    progress: Callable[[str], None],
    wants: Callable[[str], bool] = lambda _: True,
) -> Iterator[tuple[str, Plan]]:
    """The named schedules that a placement allows, as candidates and for comparison.

    Args:
        placement: Any placement.
        num_microbatches: Micro-batches per step.
        progress: Called with each name before its plan is made.
        wants: Says of a name whether its plan is to be made.

    Yields:
        (name, plan) of each schedule that is defined here.
    """
    for family in FAMILIES:
        if not wants(family.name):
            continue
        progress(family.name)
        look()
        try:
            plan = family(placement, num_microbatches)
            look()
            assert plan.nodes  # raises PlanError where a schedule did not expect this placement
        except RotaError:
            continue  # for another placement, or other numbers
        look()
        yield family.name, plan
