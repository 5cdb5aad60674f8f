"""Layouts: how a model and a batch can be divided among a machine's ranks; and candidates, which are cut, too."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import add
from typing import Any, Literal, NamedTuple

from rota import cutting
from rota.core.costs import Costs
from rota.core.errors import SplitError
from rota.core.layers import LayerCosts
from rota.core.placement import Placement
from rota.core.placing import bidirectional, place
from rota.core.plan import Usage
from rota.planning.machine import Machine
from rota.planning.request import Request

Shape = Literal["chain", "interleaved", "wave", "bidirectional"]
Recompute = Literal["none", "all", "all but the last"]

_TIMES = ("forward_us", "backward_us", "weight_us", "recompute_us", "optimizer_us", "spread_us")
_STAGES_PER_RANK = (2, 3, 4, 6, 8)  # in addition to 1; more of them cost transfers and gain little


@dataclass(frozen=True, slots=True)
class Layout:
    """`num_replicas` pipelines on `num_ranks` ranks each, with `stages_per_rank` stages per rank.

    Each pipeline runs `num_microbatches` of `rows` rows. `recompute` names the stages that recompute their forwards.
    """

    num_ranks: int
    num_replicas: int
    rows: int
    num_microbatches: int
    shape: Shape = "chain"
    stages_per_rank: int = 1
    recompute: Recompute = "none"

    @property
    def division(self) -> tuple[int, int]:
        """How the processes are divided: ranks of a pipeline, and replicas."""
        return self.num_ranks, self.num_replicas

    @property
    def num_stages(self) -> int:
        """Stages of one copy of the model."""
        return self.num_ranks * self.stages_per_rank

    @property
    def has_copies(self) -> bool:
        """Whether every stage is on two ranks, so that all weights are held twice."""
        return self.shape == "bidirectional"

    @property
    def sums_gradients(self) -> bool:
        """Whether several processes add up the gradients of a stage, in a buffer of the same size that each holds."""
        return self.num_replicas > 1 or self.has_copies

    @property
    def ranks(self) -> list[int]:
        """The rank of each stage; of two copies of the model, first those of the first."""
        n = self.num_ranks
        down_and_up = [*range(n), *reversed(range(n))]
        if self.has_copies:
            return down_and_up
        if self.shape == "wave":
            return [down_and_up[stage % (2 * n)] for stage in range(self.num_stages)]
        return [stage % n for stage in range(self.num_stages)]

    @property
    def recomputed(self) -> range:
        """The stages that `recompute` names."""
        return range({"none": 0, "all": self.num_stages}.get(self.recompute, self.num_stages - 1))


def layouts(request: Request, rows: int) -> Iterator[Layout]:
    """All layouts for micro-batches of this size. Only a chain has several stages per rank.

    Stages are on two ranks only if `copies` may be, and if the cost of summing their gradients is known.
    """
    machine, layers, choices = request.machine, request.profiles[rows], request.choices
    for num_ranks in range(1, min(machine.num_ranks, layers.num_layers) + 1):
        if choices.pipeline_ranks not in (None, num_ranks):
            continue
        shapes = [*_shapes(request, layers, num_ranks)]
        for num_replicas in range(1, machine.num_ranks // num_ranks + 1 if request.may_replicate else 2):
            num_microbatches, left = divmod(request.batch_rows, num_replicas * rows)
            if left or not num_microbatches:
                continue
            sizes = num_ranks, num_replicas, rows, num_microbatches
            for shape, stages_per_rank in shapes:
                if shape == "bidirectional" and num_microbatches % 2:
                    continue
                for recompute in _recomputes(num_ranks * stages_per_rank, request.may_recompute):
                    yield Layout(*sizes, shape, stages_per_rank, recompute)


def _shapes(request: Request, layers: LayerCosts, num_ranks: int) -> Iterator[tuple[Shape, int]]:
    yield "chain", 1
    is_chain = all(target == source + 1 for source, target in layers.edges)  # wherever the model is cut
    if num_ranks == 1 or not is_chain:
        return
    for count in _STAGES_PER_RANK:
        if num_ranks * count <= layers.num_layers:
            yield "interleaved", count
            if count % 2 == 0:
                yield "wave", count
    machine, choices = request.machine, request.choices
    may_copy = choices.copies and not choices.inference and machine.prices_sums
    # Copies of a stage on ranks of different speeds would be stages of different costs.
    if num_ranks % 2 == 0 and may_copy and len(set(machine.slowdowns)) == 1:
        yield "bidirectional", 1


def _recomputes(num_stages: int, recompute: bool) -> Iterator[Recompute]:
    yield "none"
    if recompute:
        yield "all"
        if num_stages > 1:
            yield "all but the last"


def cuts(layers: LayerCosts, layout: Layout, machine: Machine) -> list[tuple[int, ...]]:
    """Cuts to try: equal layers, the best balanced, and the best balanced within the memory limits, if there is one."""
    limits, num_stages = machine.cluster(*layout.division).limit_bytes, layout.num_stages
    ranks, slowdowns = tuple(layout.ranks[:num_stages]), machine.slowdowns_of(*layout.division)
    balanced = _Balanced(layers, ranks, slowdowns, layout.recomputed)
    boundaries = [tuple(cutting.uniform(layers.num_layers, num_stages)), _cut(balanced)]
    if any(limit is not None for limit in limits):
        in_flight = tuple(min(num_stages - stage, layout.num_microbatches) for stage in range(num_stages))  # 1F1B's
        if layout.sums_gradients:  # into buffers, which are always held, as parameters are
            held = tuple(map(add, layers.parameter_bytes, layers.gradient_bytes))
            balanced = balanced._replace(layers=replace(layers, parameter_bytes=held))
        boundaries.append(_cut(balanced._replace(limit_bytes=limits, in_flight=in_flight)))
    return [*dict.fromkeys(filter(None, boundaries))]


class _Balanced(NamedTuple):
    """The arguments of `cutting.cut`, which several layouts have in common."""

    layers: LayerCosts
    ranks: tuple[int, ...]
    slowdowns: tuple[float, ...]
    recompute: range
    limit_bytes: tuple[int | None, ...] | None = None
    in_flight: tuple[int, ...] | None = None


@lru_cache(10_000)
def _cut(balanced: _Balanced) -> tuple[int, ...]:
    """The balanced cut's boundaries; empty if no cut is within the limits."""
    try:
        return tuple(cutting.cut(**balanced._asdict()))
    except SplitError:
        return ()


@dataclass(frozen=True)
class Candidate:
    """A plan except for the order of its ops; `measured`: the stages' own costs, if they were measured too."""

    request: Request
    layout: Layout
    boundaries: tuple[int, ...]
    splits_backward: bool = False
    recomputed: frozenset[int] = frozenset()
    measured: Costs | None = None

    @property
    def layers(self) -> LayerCosts:
        """The profile of the layers at the layout's rows per micro-batch."""
        return self.request.profiles[self.layout.rows]

    @property
    def usage(self) -> Usage:
        """How a training script uses the plan: its cuts, rows per micro-batch, replicas and layers per stage."""
        num_layers = tuple(b - a for a, b in pairwise(self.boundaries))
        cuts, layout = self.layers.cuts_at(self.boundaries), self.layout
        return Usage(cuts, layout.rows, layout.num_replicas, num_layers, self.layers.note)

    def recomputing(self, stages: Collection[int]) -> Candidate:
        """This candidate with exactly `stages` recomputed."""
        return replace(self, recomputed=frozenset(stages))

    @cached_property
    def costs(self) -> Costs:
        """Costs of each stage of one copy of the model, on its rank. Raises PlacementError."""
        costs = self.measured or self.layers.stages(
            self.boundaries, split_backward=self.splits_backward, recompute=self.recomputed
        )
        slowdowns = self.request.machine.slowdowns_of(*self.layout.division)
        factors = [slowdowns[rank] for rank in self.layout.ranks[: self.layout.num_stages]]
        columns: dict[str, Any] = {
            name: _slowed(us, factors) for name in _TIMES if (us := getattr(costs, name)) is not None
        }
        gradients = [sum(self.layers.gradient_bytes[a:b]) for a, b in pairwise(self.boundaries)]
        if self.layout.sums_gradients:
            columns["static_bytes"] = tuple(map(add, costs.static_bytes, gradients))
        return replace(costs, **columns, reduce_us=self._reduce_us(gradients))

    def _reduce_us(self, gradients: Sequence[int]) -> tuple[int, ...]:
        """For each stage: replicas sum their gradients, and so do the two copies of a stage in a bidirectional plan."""
        machine, division = self.request.machine, self.layout.division
        times = []
        for stage, num_bytes in enumerate(gradients):
            holders = [*machine.holders(*division, self.layout.ranks[stage])]
            if self.layout.has_copies:
                holders += machine.holders(*division, self.layout.num_ranks - 1 - stage)
            times.append(machine.reduce_us(num_bytes, sorted(holders)))
        return tuple(times)

    @cached_property
    def placement(self) -> Placement:
        """Tasks and edges of one micro-batch. Raises PlacementError."""
        cluster = self.request.machine.cluster(*self.layout.division)
        if self.layout.has_copies:
            return bidirectional(self.costs, cluster)
        placement = place(self.costs, cluster, self.layout.ranks)
        return placement.forward_only() if self.request.choices.inference else placement


def _slowed(times_us: Sequence[int | None], factors: Sequence[float]) -> tuple[int | None, ...]:
    """Times multiplied by each stage's factor, as whole µs, rounded up."""
    return tuple(
        None if us is None else us if factor == 1 else math.ceil(us * factor)
        for us, factor in zip(times_us, factors, strict=True)
    )
