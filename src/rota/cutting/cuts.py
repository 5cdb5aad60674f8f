"""`cut`: from measured layers to the stages of each rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction
from itertools import accumulate
from typing import Literal, final, get_args, overload

from rota.core.errors import SplitError
from rota.core.layers import LayerCosts
from rota.core.units import count_text
from rota.cutting.chain import cut_chain
from rota.cutting.cut_problem import CutProblem, StageMemory
from rota.cutting.virtual_stages import cut_virtual_stages

CutPlacement = Literal["chain", "interleaved", "wave"]


@final
@dataclass(frozen=True, slots=True)
class Cut(Sequence[int]):
    """A sequence of boundaries, with how good they are.

    Attributes:
        boundaries: 0, the first layer of each later stage, and the number of layers.
        rank_us: Time of one micro-batch on each rank, in µs: all of the rank's stages, slowdown included. The largest
            is the time per micro-batch in steady state.
        bound_us: Proven lower bound on the largest `rank_us` of any cut within the limits.
    """

    boundaries: tuple[int, ...]
    rank_us: tuple[Fraction, ...]
    bound_us: Fraction

    @property
    def slowest_us(self) -> Fraction:
        """Time of one micro-batch on the slowest rank."""
        return max(self.rank_us)

    @property
    def gap(self) -> float:
        """Relative gap between the slowest rank and the lower bound, 0 to 1; 0 is proven optimal."""
        return float((self.slowest_us - self.bound_us) / self.slowest_us) if self.slowest_us else 0.0

    def __len__(self) -> int:
        return len(self.boundaries)

    def __iter__(self) -> Iterator[int]:
        return iter(self.boundaries)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.boundaries[index]


def cut(
    layers: LayerCosts,
    num_ranks: int,
    *,
    stages_per_rank: int = 1,
    placement: CutPlacement = "chain",
    limit_bytes: int | Sequence[int | None] | None = None,
    in_flight: Sequence[int] | None = None,
    slowdowns: Sequence[float] | None = None,
    extra_us: tuple[int, int] = (0, 0),
    split_backward: bool = False,
    recompute: Collection[int] = (),
    num_nodes: int = 4_000,
) -> Cut:
    """Cut layers into stages so that the slowest rank is as fast as possible.

    A rank's time is F + B of one micro-batch over its stages, and R where a stage recomputes. With one stage per rank
    the cut is exact and costs milliseconds. With several it is exact if the search ends within `num_nodes`;
    `Cut.gap` says how far it may be from the optimum. Among equally fast cuts the one with the least sum of squares of
    the ranks' times is chosen (with several stages per rank: a local optimum of moves of single layers).

    Args:
        layers: Measured costs of the model's layers.
        num_ranks: Number of ranks.
        stages_per_rank: Stages per rank: 1 for "chain", any number for "interleaved", an even one for "wave".
        placement: How stages are placed: "chain", one per rank; "interleaved", round robin (`rota.interleaved`);
            "wave", down the ranks and back up (`rota.wave`).
        limit_bytes: Memory limit of every rank, or one per rank (None: no limit). Static bytes, the activations of the
            micro-batches in flight and the highest peak must fit. Transfers depend on the plan and are not counted;
            `rota.check` counts them.
        in_flight: Number of micro-batches in flight per stage. Default: the number of stages from it to the last, as in
            1F1B.
        slowdowns: One factor per rank that multiplies its times.
        extra_us: Time added to the first and to the last stage.
        split_backward: Whether every stage but the first has I and W instead of B.
        recompute: The stages that recompute their activations.
        num_nodes: Node limit of the tree search for several stages per rank.

    Returns:
        The boundaries, each rank's time, and a lower bound on the slowest rank's time.

    Raises:
        SplitError: An argument is invalid, no cut fits in memory, or the search found none.
    """
    _validate(layers, num_ranks, stages_per_rank, placement, extra_us)
    rank_of = _rank_of(num_ranks, stages_per_rank, placement)
    num_stages = len(rank_of)
    if outside := [stage for stage in recompute if not 0 <= stage < num_stages]:
        raise SplitError(f"recompute has stage {outside[0]}; the stages are 0 to {num_stages - 1}")
    weights, unit = _weights(slowdowns, num_ranks)
    problem = CutProblem(
        layers.num_layers,
        rank_of,
        _prefixes(layers, num_stages, split_backward, recompute),
        [extra_us[0] * (stage == 0) + extra_us[1] * (stage == num_stages - 1) for stage in range(num_stages)],
        weights,
        _memory(layers, limit_bytes, num_ranks, in_flight, num_stages, split_backward, recompute),
    )
    boundaries, bound = _solve(problem, num_nodes)
    times = problem.rank_times(boundaries)
    return Cut(tuple(boundaries), tuple(Fraction(time, unit) for time in times), Fraction(bound, unit))


def _solve(problem: CutProblem, num_nodes: int) -> tuple[list[int], int]:
    """Boundaries, and a lower bound on the slowest rank's time, in units."""
    if problem.num_ranks == problem.num_stages:
        if (chain := cut_chain(problem)) is None:
            raise SplitError(_infeasibility(problem))
        return chain, max(problem.rank_times(chain))
    # The search for balanced ranks begins with balanced stages.
    weights = [problem.weights[rank] for rank in problem.rank_of]
    one_per_rank = replace(problem, rank_of=range(problem.num_stages), weights=weights, memory=None)
    first = cut_chain(one_per_rank)
    assert first is not None, "without limits, and with at least one layer per stage, a cut exists"
    found, bound = cut_virtual_stages(problem, first, num_nodes)
    if found is None:
        is_proven = bound > problem.upper_bound
        searched = "" if is_proven else f" was found within {num_nodes:,} nodes; raise num_nodes, or"
        raise SplitError(_infeasibility(problem, searched))
    return found, bound


def _infeasibility(problem: CutProblem, searched: str = "") -> str:
    """Why no cut fits in memory, and what to do."""
    assert problem.memory is not None, "without limits a cut exists"
    stages = count_text(problem.num_stages, "stage")
    limits = " ".join("none" if limit is None else str(limit) for limit in dict.fromkeys(problem.memory.limits))
    static_bytes = problem.memory.least_static_bytes(0)
    remedy = "raise the limit, recompute more stages, use more ranks or make micro-batches smaller"
    return (
        f"no cut of {count_text(problem.num_layers, 'layer')} into {stages} on {count_text(problem.num_ranks, 'rank')} "
        f"within limit_bytes {limits}{searched or ':'} {remedy} (layers have {static_bytes} static bytes)"
    )


def _validate(
    layers: LayerCosts, num_ranks: int, stages_per_rank: int, placement: str, extra_us: tuple[int, int]
) -> None:
    for name, number in (("num_ranks", num_ranks), ("stages_per_rank", stages_per_rank)):
        if number < 1:
            raise SplitError(f"{name} is {number}: give at least 1")
    if placement not in get_args(CutPlacement):
        near = get_close_matches(str(placement), get_args(CutPlacement), 1, 0)
        raise SplitError(
            f"placement is {placement!r}: give one of {', '.join(get_args(CutPlacement))}; perhaps {near[0]}?"
        )
    if placement == "chain" and stages_per_rank > 1:
        raise SplitError(f"stages_per_rank is {stages_per_rank}, but a chain has 1; give 'interleaved' or 'wave'")
    if placement == "wave" and stages_per_rank % 2:
        raise SplitError(f"stages_per_rank is {stages_per_rank}, but a wave goes down and up: give an even number")
    if layers.num_layers < num_ranks * stages_per_rank:
        raise SplitError(
            f"{count_text(layers.num_layers, 'layer')} for {num_ranks * stages_per_rank} stages ({num_ranks} ranks, "
            f"{stages_per_rank} per rank): give fewer ranks, fewer stages per rank, or a model with more CutPoints"
        )
    if min(extra_us) < 0:
        raise SplitError(f"extra_us is {extra_us}: give two numbers of 0 or more, for the first and the last stage")


def _rank_of(num_ranks: int, stages_per_rank: int, placement: CutPlacement) -> list[int]:
    """The rank of each stage, as `rota.interleaved` and `rota.wave` place them."""
    rounds = [[*range(num_ranks)] for _ in range(stages_per_rank)]
    if placement == "wave":
        for i in range(1, stages_per_rank, 2):
            rounds[i].reverse()
    return [rank for each in rounds for rank in each]


def _weights(slowdowns: Sequence[float] | None, num_ranks: int) -> tuple[list[int], int]:
    """Whole numbers in proportion to the slowdowns, and the number that represents a slowdown of 1."""
    if slowdowns is None:
        return [1] * num_ranks, 1
    if len(slowdowns) != num_ranks:
        raise SplitError(f"slowdowns has {len(slowdowns)} entries for {num_ranks} ranks; give one per rank")
    for rank, slowdown in enumerate(slowdowns):
        if not 0 < slowdown < math.inf:
            raise SplitError(f"slowdowns[{rank}] is {slowdown}: give a number above 0; 1 is as fast as measured")
    exact = [Fraction(slowdown) for slowdown in slowdowns]
    unit = math.lcm(*(one.denominator for one in exact))
    return [int(one * unit) for one in exact], unit


def _prefixes(
    layers: LayerCosts, num_stages: int, split_backward: bool, recompute: Collection[int]
) -> list[Sequence[int]]:
    """The time before each layer, per stage. The first stage sends no gradient back, so its backward is whole."""
    whole = [sum(times) for times in zip(layers.forward_us, layers.backward_us, strict=True)]
    parts = [sum(times) for times in zip(layers.forward_us, layers.input_us, layers.weight_us, strict=True)]
    once, again = [], []
    for work in (whole, parts if split_backward else whole):
        once.append([0, *accumulate(work)])
        again.append([0, *accumulate(us + more for us, more in zip(work, layers.recompute_us, strict=True))])
    return [(again if stage in recompute else once)[stage > 0] for stage in range(num_stages)]


def _memory(
    layers: LayerCosts,
    limit_bytes: int | Sequence[int | None] | None,
    num_ranks: int,
    in_flight: Sequence[int] | None,
    num_stages: int,
    split_backward: bool,
    recompute: Collection[int],
) -> StageMemory | None:
    limits = [limit_bytes] * num_ranks if limit_bytes is None or isinstance(limit_bytes, int) else [*limit_bytes]
    if len(limits) != num_ranks:
        raise SplitError(
            f"limit_bytes has {len(limits)} entries for {num_ranks} ranks; give one per rank, or one number"
        )
    counts = [*range(num_stages, 0, -1)] if in_flight is None else [*in_flight]
    if len(counts) != num_stages or min(counts) < 0:
        raise SplitError(
            f"in_flight is {counts}: give {num_stages} numbers of micro-batches of 0 or more, one per stage"
        )
    if all(limit is None for limit in limits):
        return None
    return StageMemory(layers, limits, counts, split_backward, recompute)
