"""All named schedules: which placement each one takes, and what its paper says of the bubble."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from rota.costs import Cluster, Costs
from rota.errors import ScheduleError
from rota.placement import Placement
from rota.placing import bidirectional, interleaved, place, wave
from rota.plan import Plan
from rota.schedules.chimera import chimera
from rota.schedules.controllable_memory import v_half, v_min
from rota.schedules.dualpipe import dualpipe, dualpipe_v
from rota.schedules.forward_only import forward_only
from rota.schedules.gpipe import gpipe
from rota.schedules.hanayo import hanayo
from rota.schedules.interleaved import interleaved_one_f_one_b, interleaved_zero_bubble, looped_bfs
from rota.schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b
from rota.schedules.varuna import varuna
from rota.schedules.zb_v import zb_v
from rota.schedules.zero_bubble import zb_h1, zb_h2
from rota.schedules.zero_bubble_auto import zb_auto


class Sizes(NamedTuple):
    """p ranks, m micro-batches, v stages a rank, and a rank's F, whole backward and W time of one micro-batch."""

    p: int
    m: int
    v: int
    f: float
    b: float
    w: float


@dataclass(frozen=True, slots=True)
class Bubble:
    """The idle time that a rank has in a step, without transfers: as published, or as `docs/schedules.md` says."""

    text: str
    us: Callable[[Sizes], float]


@dataclass(frozen=True, slots=True)
class Family:
    """A named schedule: `family(placement, num_microbatches)` makes its plan.

    `place` makes the placement it takes, by default from costs with `stages_a_rank` stages a rank. `backward`: "whole"
    (B), "split" (I and W) or "any". `bubble` counts the idle time within the span where `of_span`, else within the
    makespan.
    """

    name: str
    schedule: Callable[[Placement, int], Plan]
    place: Callable[[Costs, Cluster], Placement]
    source: str
    backward: Literal["whole", "split", "any"] = "any"
    stages_a_rank: int = 1
    recomputes: bool = False
    bubble: Bubble | None = None
    of_span: bool = False

    def __call__(self, placement: Placement, num_microbatches: int) -> Plan:
        return self.schedule(placement, num_microbatches)

    def costs_from(self, costs: Costs) -> Costs:
        """A chain of one stage a rank, cut and split as this family's paper has it.

        Each rank's time and memory is dealt evenly to its stages, rounded up. A backward that must be split and is
        not is halved; one that is split and must be whole is joined.
        """
        if costs.edges is not None:
            raise ScheduleError(f"{self.name}: the costs have edges, but the table compares chains; leave edges out")
        # As its paper has it: a backward that need not be split is whole.
        costs = _joined(costs) if self.backward == "any" else self.adapted(costs)
        return costs if self.stages_a_rank == 1 else _cut(costs, self.stages_a_rank, self.place is wave)

    def adapted(self, costs: Costs) -> Costs:
        """The same stages, their backward split, halved or joined, or their forwards recomputed, as needed here."""
        if self.recomputes and costs.recompute_us is None:
            sizes = costs.boundary_bytes
            sent = sizes if isinstance(sizes, int) else max(sizes, default=0)
            kept = tuple(min(sent, held) for held in costs.activation_bytes)  # what came in, to begin again from
            costs = replace(costs, recompute_us=(*costs.forward_us[:-1], None), checkpoint_bytes=kept)
        if self.backward == "any":
            return costs
        return _joined(costs) if self.backward == "whole" else _split(costs)


def _dealt(costs: Costs, cluster: Cluster) -> Placement:
    """Any number of stages, dealt to the ranks in turn."""
    return place(costs, cluster, [stage % cluster.num_ranks for stage in range(costs.num_stages)])


def _dealt_forward(costs: Costs, cluster: Cluster) -> Placement:
    return _dealt(costs, cluster).forward_only()


def _joined(costs: Costs) -> Costs:
    if costs.weight_us is None:
        return costs
    whole = tuple(i + w for i, w in zip(costs.backward_us, costs.weight_us, strict=True))
    return replace(costs, backward_us=whole, weight_us=None)


def _split(costs: Costs) -> Costs:
    if costs.weight_us is not None:
        return costs
    weight = tuple(b // 2 for b in costs.backward_us)
    return replace(
        costs, backward_us=tuple(b - w for b, w in zip(costs.backward_us, weight, strict=True)), weight_us=weight
    )


def _cut(costs: Costs, parts: int, up_and_down: bool) -> Costs:
    """`parts` stages a rank; what a rank has is dealt evenly to its stages."""
    n = costs.num_stages
    ranks = [s % n if not up_and_down or s // n % 2 == 0 else n - 1 - s % n for s in range(n * parts)]
    values: dict[str, object] = {}
    for name in _PER_STAGE:
        column = getattr(costs, name)
        if column is not None:
            values[name] = tuple(-(-column[rank] // parts) for rank in ranks)
    for name in ("boundary_bytes", "gradient_bytes"):
        sizes = getattr(costs, name)
        if isinstance(sizes, tuple):
            values[name] = max(sizes, default=0)
    return Costs(**values)  # type: ignore[arg-type]


_PER_STAGE = (
    *("forward_us", "backward_us", "weight_us", "activation_bytes", "input_frees_bytes", "forward_peak_bytes"),
    *("backward_peak_bytes", "weight_peak_bytes", "static_bytes", "reduce_us", "optimizer_us"),
)

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
    Family("gpipe", gpipe, _dealt, "Huang et al. 2019", bubble=_1F1B),
    Family("1f1b", one_f_one_b, _dealt, "Narayanan et al. 2021", bubble=_1F1B),
    Family("eager_1f1b", eager_one_f_one_b, _dealt, "Zhuang et al. 2022", bubble=_1F1B),
    Family(
        "interleaved_1f1b",
        interleaved_one_f_one_b,
        interleaved,
        "Narayanan et al. 2021 (Megatron-LM)",
        stages_a_rank=2,
        bubble=_INTERLEAVED,
    ),
    Family(
        "looped_bfs",
        looped_bfs,
        interleaved,
        "Lamy-Poirier 2023",
        stages_a_rank=2,
        bubble=_INTERLEAVED,
    ),
    Family("zb_h1", zb_h1, place, "Qi et al. 2023", "split", bubble=_zb(1)),
    Family("zb_h2", zb_h2, place, "Qi et al. 2023", "split", bubble=_zb(2), of_span=True),
    Family("zb_auto", zb_auto, place, "Qi et al. 2023", "split"),
    Family(
        "interleaved_zb",
        interleaved_zero_bubble,
        interleaved,
        "Qi et al. 2023",
        "split",
        stages_a_rank=2,
    ),
    Family("zb_v", zb_v, wave, "Qi et al. 2024", "split", 2, bubble=_NONE, of_span=True),
    Family("v_half", v_half, wave, "Qi et al. 2024", "split", 2),
    Family("v_min", v_min, wave, "Qi et al. 2024", "split", 2),
    Family("dualpipe_v", dualpipe_v, wave, "DeepSeek-AI 2024", "split", 2, bubble=_DUALPIPE_V),
    Family("dualpipe", dualpipe, bidirectional, "DeepSeek-AI 2024", "split", bubble=_DUALPIPE),
    Family("chimera", chimera, bidirectional, "Li and Hoefler 2021", "whole", bubble=_CHIMERA),
    Family("hanayo", hanayo, wave, "Liu et al. 2023", stages_a_rank=2, bubble=_HANAYO),
    Family("varuna", varuna, place, "Athlur et al. 2022", "whole", recomputes=True),
    Family("forward_only", forward_only, _dealt_forward, "inference"),
)

#: By the names that the command line uses.
NAMED: Mapping[str, Family] = {family.name: family for family in FAMILIES}
