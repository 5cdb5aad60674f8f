"""`cut`: from measured layers to the stages of each rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import final, overload

from rota.core.errors import SplitError
from rota.core.layers import LayerCosts
from rota.core.text import count_text
from rota.cutting.chain import CutProblem, StageMemory, cut_chain
from rota.cutting.virtual_stages import cut_virtual_stages

NUM_NODES = 4_000  # of the tree search for several stages per rank


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
    ranks: int | Sequence[int],
    *,
    limit_bytes: int | Sequence[int | None] | None = None,
    in_flight: Sequence[int] | None = None,
    slowdowns: Sequence[float] | None = None,
    recompute: Collection[int] = (),
) -> Cut:
    """Cut layers into stages so that the slowest rank is as fast as possible.

    A rank's time is F + B of one micro-batch over its stages, and R where a stage recomputes. With one stage per rank
    the cut is exact and costs milliseconds. With several, a tree search stops after some thousand nodes; `Cut.gap`
    says how far the cut may be from the optimum. Among equally fast cuts the one with the least sum of squares of the
    ranks' times is chosen (with several stages per rank: a local optimum of moves of single layers).

    Args:
        layers: Measured costs of the model's layers.
        ranks: The number of ranks, with one stage each; or the rank of each stage, in rounds that have every rank once,
            as `rota.interleaved` (`[0, 1, 0, 1]`) and `rota.wave` (`[0, 1, 1, 0]`) place them.
        limit_bytes: Memory limit of every rank, or one per rank (None: no limit). Static bytes, the activations of the
            micro-batches in flight and the highest peak must fit. Transfers depend on the plan and are not counted;
            `rota.check` counts them.
        in_flight: Number of micro-batches in flight per stage. Default: the number of stages from it to the last, as in
            1F1B.
        slowdowns: One factor per rank that multiplies its times.
        recompute: The stages that recompute their activations.

    Returns:
        The boundaries, each rank's time, and a lower bound on the slowest rank's time.

    Raises:
        SplitError: An argument is invalid, no cut fits in memory, or the search found none.
    """
    rank_of = [*range(ranks)] if isinstance(ranks, int) else [*ranks]
    num_stages, num_ranks = len(rank_of), max(rank_of, default=-1) + 1
    rounds = [sorted(rank_of[first : first + num_ranks]) for first in range(0, num_stages, max(num_ranks, 1))]
    if not rounds or any(ranks_of_round != [*range(num_ranks)] for ranks_of_round in rounds):
        raise SplitError(
            f"ranks is {ranks}: give at least 1 rank, or the rank of each stage in rounds that have every rank once, "
            "such as [0, 1, 1, 0]"
        )
    if layers.num_layers < num_stages:
        raise SplitError(
            f"{count_text(layers.num_layers, 'layer')} for {num_stages} stages: give fewer ranks, fewer stages per "
            "rank, or a model with more CutPoints"
        )
    if outside := [stage for stage in recompute if not 0 <= stage < num_stages]:
        raise SplitError(f"recompute has stage {outside[0]}; the stages are 0 to {num_stages - 1}")
    weights, unit = _weights(slowdowns, num_ranks)
    memory = _memory(layers, limit_bytes, num_ranks, in_flight, num_stages, recompute)
    problem = CutProblem(layers.num_layers, rank_of, _prefixes(layers, num_stages, recompute), weights, memory)
    boundaries, bound = _solve(problem)
    times = problem.rank_times(boundaries)
    return Cut(tuple(boundaries), tuple(Fraction(time, unit) for time in times), Fraction(bound, unit))


def _solve(problem: CutProblem) -> tuple[list[int], int]:
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
    boundaries, bound = cut_virtual_stages(problem, first, NUM_NODES)
    if boundaries is None:
        is_proven = bound > problem.upper_bound
        searched = "" if is_proven else f" was found within {NUM_NODES:,} nodes of the search; to be sure,"
        raise SplitError(_infeasibility(problem, searched))
    return boundaries, bound


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
    unit = math.lcm(*(slowdown.denominator for slowdown in exact))
    return [int(slowdown * unit) for slowdown in exact], unit


def _prefixes(layers: LayerCosts, num_stages: int, recompute: Collection[int]) -> list[Sequence[int]]:
    """The time before each layer, per stage."""
    work = [sum(times) for times in zip(layers.forward_us, layers.backward_us, strict=True)]
    once = [0, *accumulate(work)]
    again = [0, *accumulate(us + more for us, more in zip(work, layers.recompute_us, strict=True))]
    return [again if stage in recompute else once for stage in range(num_stages)]


def _memory(
    layers: LayerCosts,
    limit_bytes: int | Sequence[int | None] | None,
    num_ranks: int,
    in_flight: Sequence[int] | None,
    num_stages: int,
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
    return StageMemory(layers, limits, counts, recompute)
