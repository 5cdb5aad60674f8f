"""A candidate: a layout, a cut and what is recomputed, as a placement."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from rota.core.costs import Costs
from rota.core.layers import LayerCosts
from rota.core.placement import Placement
from rota.core.placing import bidirectional, place
from rota.core.plan import Usage
from rota.planning.layouts import Layout
from rota.planning.request import Request


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
        return replace(costs, **columns, reduce_us=self._reduce_us())

    def _reduce_us(self) -> tuple[int, ...]:
        """For each stage: replicas sum their gradients, and so do the two copies of a stage in a bidirectional plan."""
        machine, division = self.request.machine, self.layout.division
        times = []
        for stage, (a, b) in enumerate(pairwise(self.boundaries)):
            holders = [*machine.holders(*division, self.layout.ranks[stage])]
            if self.layout.has_copies:
                holders += machine.holders(*division, self.layout.num_ranks - 1 - stage)
            times.append(machine.reduce_us(sum(self.layers.gradient_bytes[a:b]), sorted(holders)))
        return tuple(times)

    @cached_property
    def placement(self) -> Placement:
        """Tasks and edges of one micro-batch. Raises PlacementError."""
        cluster = self.request.machine.cluster(*self.layout.division)
        if self.layout.has_copies:
            return bidirectional(self.costs, cluster)
        placement = place(self.costs, cluster, self.layout.ranks)
        return placement.forward_only() if self.request.choices.inference else placement


_TIMES = ("forward_us", "backward_us", "weight_us", "recompute_us", "optimizer_us", "spread_us")


def _slowed(times_us: Sequence[int | None], factors: Sequence[float]) -> tuple[int | None, ...]:
    """Times multiplied by each stage's factor, as whole µs, rounded up."""
    return tuple(
        None if us is None else us if factor == 1 else math.ceil(us * factor)
        for us, factor in zip(times_us, factors, strict=True)
    )
