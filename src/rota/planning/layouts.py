"""Layouts: how a model and a batch can be divided among a machine's ranks, before cuts and orders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rota import cutting
from rota.core.errors import SplitError
from rota.core.layers import LayerCosts
from rota.planning.machine import Machine

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


def layouts(
    rows: Iterable[int],
    num_layers: int,
    machine: Machine,
    batch_rows: int,
    *,
    is_chain: bool = True,
    inference: bool = False,
    recompute: bool = True,
    pipeline_ranks: int | None = None,
    copies: bool = False,
    replicas: bool = True,
) -> Iterator[Layout]:
    """All layouts for micro-batches of these sizes. Only a chain has several stages per rank.

    Stages are on two ranks only with `copies`, and only if the cost of summing their gradients is known. There are
    several replicas only with `replicas`.
    """
    for num_ranks in range(1, min(machine.num_ranks, num_layers) + 1):
        if pipeline_ranks not in (None, num_ranks):
            continue
        shapes = list(
            _shapes(num_ranks, num_layers, is_chain, copies and machine.prices_sums and not inference, machine)
        )
        most = machine.num_ranks // num_ranks if replicas else 1
        for num_replicas in range(1, most + 1):
            for each in sorted(rows, reverse=True):
                num_microbatches, left = divmod(batch_rows, num_replicas * each)
                if left or not num_microbatches:
                    continue
                for shape, stages_per_rank in shapes:
                    for again in _recomputes(num_ranks * stages_per_rank, recompute):
                        if shape != "bidirectional" or num_microbatches % 2 == 0:
                            sizes = num_ranks, num_replicas, each, num_microbatches
                            yield Layout(*sizes, shape, stages_per_rank, again)


def _shapes(
    num_ranks: int, num_layers: int, is_chain: bool, copies: bool, machine: Machine
) -> Iterator[tuple[Shape, int]]:
    yield "chain", 1
    if num_ranks == 1 or not is_chain:
        return
    for count in _STAGES_PER_RANK:
        if num_ranks * count <= num_layers:
            yield "interleaved", count
            if count % 2 == 0:
                yield "wave", count
    # Copies of a stage on ranks of different speeds would be stages of different costs.
    if num_ranks % 2 == 0 and copies and len(set(machine.slowdowns)) == 1:
        yield "bidirectional", 1


def _recomputes(num_stages: int, recompute: bool) -> Iterator[Recompute]:
    yield "none"
    if recompute:
        yield "all"
        if num_stages > 1:
            yield "all but the last"


def is_chain(layers: LayerCosts) -> bool:
    """Whether every stage sends only to the next one, wherever the model is cut."""
    return all(target == source + 1 for source, target in layers.edges)


def cuts(layers: LayerCosts, layout: Layout, machine: Machine) -> list[tuple[int, ...]]:
    """Cuts to try: equal layers, the best balanced, and the best balanced within the memory limits, if there is one."""
    slowdowns = machine.slowdowns_of(layout.num_ranks, layout.num_replicas)
    limits = machine.cluster(layout.num_ranks, layout.num_replicas).limit_bytes
    num_stages = layout.num_stages
    in_flight = tuple(min(num_stages - stage, layout.num_microbatches) for stage in range(num_stages))  # 1F1B's
    placed = "chain" if layout.shape == "bidirectional" else layout.shape
    balanced = (layers, layout.num_ranks, layout.stages_per_rank, placed, slowdowns, layout.recomputed)
    found = [tuple(cutting.uniform(layers.num_layers, num_stages)), _cut(*balanced)]
    if any(limit is not None for limit in limits):
        found.append(_cut(*balanced, limits, in_flight))
    return list(dict.fromkeys(boundaries for boundaries in found if boundaries))


@lru_cache(10_000)
def _cut(
    layers: LayerCosts,
    num_ranks: int,
    stages_per_rank: int,
    placed: Literal["chain", "interleaved", "wave"],
    slowdowns: tuple[float, ...],
    recompute: range,
    limits: tuple[int | None, ...] | None = None,
    in_flight: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """The balanced cut's boundaries; empty if no cut is within the limits."""
    try:
        boundaries = cutting.cut(
            layers,
            num_ranks,
            stages_per_rank=stages_per_rank,
            placement=placed,
            slowdowns=slowdowns,
            recompute=recompute,
            limit_bytes=limits,
            in_flight=in_flight,
        )
    except SplitError:
        return ()
    return tuple(boundaries)
