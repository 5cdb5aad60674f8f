"""Layouts: how a model and a batch can be divided among a machine's ranks, before cuts and orders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from rota import cutting
from rota.core.errors import SplitError
from rota.core.layers import LayerCosts
from rota.planning.machine import Machine
from rota.planning.request import Request

Shape = Literal["chain", "interleaved", "wave", "bidirectional"]
Recompute = Literal["none", "all", "all but the last"]

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
