"""Measured layers -> the stages of each rank: `cut`, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction
from itertools import accumulate
from typing import Literal, final, get_args, overload

from rota.cutting.chain import cut_chain
from rota.cutting.deal import Deal
from rota.cutting.dealing import cut_dealt
from rota.cutting.room import Room
from rota.errors import SplitError
from rota.layers import LayerCosts
from rota.units import count_text

Dealt = Literal["chain", "interleaved", "wave"]


@final
@dataclass(frozen=True, slots=True)
class Cut(Sequence[int]):
    """The boundaries, as a sequence, and how good they are.

    `rank_us`: what one micro-batch takes on each rank, its stages together, slowdown included. The largest is the time
    a micro-batch takes in steady state; no cut within the limits has less than `bound_us`.
    """

    boundaries: tuple[int, ...]
    rank_us: tuple[Fraction, ...]
    bound_us: Fraction

    @property
    def slowest_us(self) -> Fraction:
        return max(self.rank_us)

    @property
    def gap(self) -> float:
        """By how much the slowest rank may still be too slow, as a part of it; 0 is proven optimal."""
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
    stages_a_rank: int = 1,
    placement: Dealt = "chain",
    limit_bytes: int | Sequence[int | None] | None = None,
    in_flight: Sequence[int] | None = None,
    slowdowns: Sequence[float] | None = None,
    extra_us: tuple[int, int] = (0, 0),
    split_backward: bool = False,
    recompute: Collection[int] = (),
    num_nodes: int = 4_000,
) -> Cut:
    """Stages whose slowest rank is as fast as it can be: F + B of one micro-batch, and R where it recomputes.

    With `split_backward` every stage but the first is taken to have I and W.

    "interleaved" deals the stages to the ranks in turn, "wave" down the ranks and back up (`rota.interleaved`, `wave`).
    `slowdowns[r]` multiplies rank r's times; `extra_us` is added to the first and to the last stage. The stages in
    `recompute` recompute. Of equal cuts the most even by squares is taken (with several stages a rank: one that moves
    of single layers do not make more even).

    `limit_bytes`, one for all ranks or one each: static bytes, and the activations of `in_flight[stage]` micro-batches
    (default: as many as there are stages from it to the last, as in 1F1B), and the highest peak fit. Transfers, which
    depend on the plan, are not counted: `rota.check` does.

    One stage a rank: exact, in milliseconds. Several: exact if the search ends within `num_nodes`; `gap` tells. Raises
    SplitError where nothing fits, or nothing is found that does.
    """
    _refuse_wrong(layers, num_ranks, stages_a_rank, placement, extra_us)
    rank_of = _rank_of(num_ranks, stages_a_rank, placement)
    num_stages = len(rank_of)
    if outside := [stage for stage in recompute if not 0 <= stage < num_stages]:
        raise SplitError(f"recompute has stage {outside[0]}; the stages are 0 to {num_stages - 1}")
    weights, unit = _weights(slowdowns, num_ranks)
    deal = Deal(
        layers.num_layers,
        rank_of,
        _prefixes(layers, num_stages, split_backward, recompute),
        [extra_us[0] * (stage == 0) + extra_us[1] * (stage == num_stages - 1) for stage in range(num_stages)],
        weights,
        _room(layers, limit_bytes, num_ranks, in_flight, num_stages, split_backward, recompute),
    )
    boundaries, bound = _solve(deal, num_nodes)
    times = deal.times(boundaries)
    return Cut(tuple(boundaries), tuple(Fraction(time, unit) for time in times), Fraction(bound, unit))


def _solve(deal: Deal, num_nodes: int) -> tuple[list[int], int]:
    """Boundaries, and what no cut is below."""
    if deal.num_ranks == deal.num_stages:
        if (chain := cut_chain(deal)) is None:
            raise SplitError(_tell_no_room(deal))
        return chain, max(deal.times(chain))
    # Stages as even as they can be, each by itself, are where the search for even ranks begins.
    alone = replace(deal, rank_of=range(deal.num_stages), weights=[deal.weights[r] for r in deal.rank_of], room=None)
    first = cut_chain(alone)
    assert first is not None, "without limits, and with a layer for each stage, there is a cut"
    found, bound = cut_dealt(deal, first, num_nodes)
    if found is None:
        is_proven = bound > deal.slowest
        searched = "" if is_proven else f" was found by trying {num_nodes:,} nodes; raise num_nodes, or"
        raise SplitError(_tell_no_room(deal, searched))
    return found, bound


def _tell_no_room(deal: Deal, searched: str = "") -> str:
    assert deal.room is not None, "without limits there is a cut"
    stages = count_text(deal.num_stages, "stage")
    limits = " ".join("none" if limit is None else str(limit) for limit in dict.fromkeys(deal.room.limits))
    remedy = "raise the limit, recompute more stages, take more ranks or make micro-batches smaller"
    return (
        f"no cut of {count_text(deal.num_layers, 'layer')} into {stages} on {count_text(deal.num_ranks, 'rank')} "
        f"within limit_bytes {limits}{searched or ':'} {remedy} (layers have {deal.room.static_bytes(0)} static bytes)"
    )


def _refuse_wrong(
    layers: LayerCosts, num_ranks: int, stages_a_rank: int, placement: str, extra_us: tuple[int, int]
) -> None:
    for name, number in (("num_ranks", num_ranks), ("stages_a_rank", stages_a_rank)):
        if number < 1:
            raise SplitError(f"{name} is {number}: give at least 1")
    if placement not in get_args(Dealt):
        near = get_close_matches(str(placement), get_args(Dealt), 1, 0)
        raise SplitError(f"placement is {placement!r}: give one of {', '.join(get_args(Dealt))}; perhaps {near[0]}?")
    if placement == "chain" and stages_a_rank > 1:
        raise SplitError(f"stages_a_rank is {stages_a_rank}, but a chain has one; give 'interleaved' or 'wave'")
    if placement == "wave" and stages_a_rank % 2:
        raise SplitError(f"stages_a_rank is {stages_a_rank}, but a wave goes down and up: give an even number")
    if layers.num_layers < num_ranks * stages_a_rank:
        raise SplitError(
            f"{count_text(layers.num_layers, 'layer')} for {num_ranks * stages_a_rank} stages ({num_ranks} ranks, "
            f"{stages_a_rank} a rank): give fewer ranks, fewer stages a rank, or a model with more CutPoints"
        )
    if min(extra_us) < 0:
        raise SplitError(f"extra_us is {extra_us}: give two numbers of 0 or more, of the first and the last stage")


def _rank_of(num_ranks: int, stages_a_rank: int, placement: Dealt) -> list[int]:
    """Of each stage, as `rota.interleaved` and `rota.wave` place them."""
    rounds = [[*range(num_ranks)] for _ in range(stages_a_rank)]
    if placement == "wave":
        for i in range(1, stages_a_rank, 2):
            rounds[i].reverse()
    return [rank for each in rounds for rank in each]


def _weights(slowdowns: Sequence[float] | None, num_ranks: int) -> tuple[list[int], int]:
    """Whole numbers in proportion to the slowdowns, and what stands for 1."""
    if slowdowns is None:
        return [1] * num_ranks, 1
    if len(slowdowns) != num_ranks:
        raise SplitError(f"slowdowns has {len(slowdowns)} entries for {num_ranks} ranks; give one a rank")
    for rank, slowdown in enumerate(slowdowns):
        if not 0 < slowdown < math.inf:
            raise SplitError(f"slowdowns[{rank}] is {slowdown}: give a number above 0; 1 is as fast as measured")
    exact = [Fraction(slowdown) for slowdown in slowdowns]
    unit = math.lcm(*(one.denominator for one in exact))
    return [int(one * unit) for one in exact], unit


def _prefixes(
    layers: LayerCosts, num_stages: int, split_backward: bool, recompute: Collection[int]
) -> list[Sequence[int]]:
    """Time until each layer, for each stage. No gradient goes on from the first stage: its backward is whole."""
    whole = [sum(times) for times in zip(layers.forward_us, layers.backward_us, strict=True)]
    parts = [sum(times) for times in zip(layers.forward_us, layers.input_us, layers.weight_us, strict=True)]
    once, again = [], []
    for work in (whole, parts if split_backward else whole):
        once.append([0, *accumulate(work)])
        again.append([0, *accumulate(us + more for us, more in zip(work, layers.recompute_us, strict=True))])
    return [(again if stage in recompute else once)[stage > 0] for stage in range(num_stages)]


def _room(
    layers: LayerCosts,
    limit_bytes: int | Sequence[int | None] | None,
    num_ranks: int,
    in_flight: Sequence[int] | None,
    num_stages: int,
    split_backward: bool,
    recompute: Collection[int],
) -> Room | None:
    limits = [limit_bytes] * num_ranks if limit_bytes is None or isinstance(limit_bytes, int) else [*limit_bytes]
    if len(limits) != num_ranks:
        raise SplitError(f"limit_bytes has {len(limits)} entries for {num_ranks} ranks; give one a rank, or a number")
    counts = [*range(num_stages, 0, -1)] if in_flight is None else [*in_flight]
    if len(counts) != num_stages or min(counts) < 0:
        raise SplitError(f"in_flight is {counts}: give {num_stages} numbers of micro-batches of 0 or more, one a stage")
    if all(limit is None for limit in limits):
        return None
    return Room(layers, limits, counts, split_backward, recompute)
