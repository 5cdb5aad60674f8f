"""The request, and a candidate for it: a layout, a cut and what is recomputed, as a placement."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from rota.core.costs import Costs
from rota.core.errors import PlacementError
from rota.core.layers import ESTIMATED, LayerCosts
from rota.core.placement import Placement
from rota.core.placing import bidirectional, place
from rota.core.units import count_text
from rota.core.usage import Usage
from rota.core.whole_numbers import whole
from rota.planning.layouts import Layout
from rota.planning.machine import Machine

_MOST_ROWS = 10_000_000  # of a step
_MOST_TOLERANCE = 0.05  # a profile whose figures are further apart is no reason to recommend much slower plans


@dataclass(frozen=True)
class Request:
    """Autoplan's arguments: `profiles` by rows per micro-batch, `batch_rows` of a step over all replicas."""

    profiles: Mapping[int, LayerCosts]
    machine: Machine
    batch_rows: int
    inference: bool = False
    recompute: bool = True  # whether stages may
    pipeline_ranks: int | None = None  # None: any number
    copies: bool = False  # whether stages may be on two ranks each
    split_backward: bool = True  # whether backwards may be split into I and W

    @property
    def may_recompute(self) -> bool:
        """Whether stages may recompute: only to save memory that is limited, as it never makes a step shorter."""
        return self.recompute and not self.inference and any(limit is not None for limit in self.machine.limits)

    @property
    def may_replicate(self) -> bool:
        """Whether there may be several replicas: only where the cost of summing their gradients is known."""
        nothing = self.inference or not any(any(layers.gradient_bytes) for layers in self.profiles.values())
        return nothing or self.machine.prices_sums

    @cached_property
    def tolerance(self) -> float:
        """The part of a step by which predicted steps may differ and count as equal: how far the profile is apart."""
        return min(max((layers.mean_spread for layers in self.profiles.values()), default=0.0), _MOST_TOLERANCE)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the layers' costs may be wrong, and what to do: a line for what estimates lack, or for a busy machine."""
        incomplete = next((layers.why_incomplete for layers in self.profiles.values() if layers.uncounted), "")
        if incomplete:
            return (incomplete,)
        doubtful = {rows: layers.why_doubtful for rows, layers in self.profiles.items() if layers.why_doubtful}
        if not doubtful:
            return ()
        rows, why = next(iter(doubtful.items()))
        more = f"; the same goes for {count_text(len(doubtful) - 1, 'other size')}" if len(doubtful) > 1 else ""
        return (
            f"layers were measured on a busy or uneven machine: with {count_text(rows, 'row')} per micro-batch, "
            f"{why}{more}. Another run may cut the model elsewhere: stop other programs, and profile again (--refresh)",
        )

    @property
    def estimated_for(self) -> str:
        """The note of costs that nothing measured, such as "estimated for h100"; "" if they are not estimates."""
        notes = (layers.note for layers in self.profiles.values())
        return next((note for note in notes if note.startswith(ESTIMATED)), "")

    @classmethod
    def checked(
        cls,
        profiles: Mapping[int, LayerCosts],
        machine: Machine,
        batch_rows: int,
        inference: bool = False,
        recompute: bool = True,
        pipeline_ranks: int | None = None,
        copies: bool = False,
        split_backward: bool = True,
        snapshots: bool = False,
    ) -> Request:
        """Validate: PlacementError where no step can be made of these micro-batches, or no pipeline of these ranks."""
        if not profiles:
            raise PlacementError("profiles is empty: measure the layers for one number of rows or more")
        for rows, layers in profiles.items():
            if layers.rows != rows:
                raise PlacementError(
                    f"profiles[{rows}] was measured with {count_text(layers.rows, 'row')} per micro-batch; give it as "
                    f"profiles[{layers.rows}]"
                )
        fits = isinstance(batch_rows, int) and not all(batch_rows % rows for rows in profiles)
        if not fits or not 1 <= batch_rows <= _MOST_ROWS:
            raise PlacementError(
                f"batch_rows is {batch_rows!r}: give a multiple of one of the rows that were measured, "
                f"{', '.join(map(str, sorted(profiles)))}, of at most {_MOST_ROWS:,}"
            )
        num_layers = max(layers.num_layers for layers in profiles.values())
        most = min(machine.num_ranks, num_layers)
        if pipeline_ranks is not None and not 1 <= whole("pipeline_ranks", pipeline_ranks) <= most:
            raise PlacementError(
                f"a pipeline of {pipeline_ranks} ranks: give 1 to {most}, as there are {machine.num_ranks} ranks and "
                f"the model can be cut into {num_layers} layers; to cut it in more places, name modules, such as "
                f"--cuts 'layers.*'"
            )
        if snapshots and inference:
            raise PlacementError("snapshots are for training, but this plan is for inference; leave one of them out")
        of = {rows: _forward_alone(layers) if inference else layers for rows, layers in sorted(profiles.items())}
        if snapshots:
            of = {rows: layers.with_snapshots() for rows, layers in of.items()}
        return cls(of, machine, batch_rows, inference, recompute, pipeline_ranks, copies, split_backward)


def _forward_alone(layers: LayerCosts) -> LayerCosts:
    """The layers for inference: their forwards, parameters and buffers alone."""
    zeros = (0,) * layers.num_layers
    backward = ("backward_us", "input_us", "weight_us", "recompute_us", "optimizer_us")
    memory = ("kept_bytes", "waiting_bytes", "backward_peak_bytes", "input_peak_bytes", "weight_peak_bytes")
    columns: dict[str, Any] = dict.fromkeys((*backward, *memory, "gradient_bytes", "optimizer_bytes"), zeros)
    columns |= dict.fromkeys(("boundary_gradient_bytes", "received_bytes"), (0,) * len(layers.edges))
    # Shared storages may be among what is left out; tied parameters count with each layer.
    columns |= dict.fromkeys(("shared", "waiting_shared", "tied"), ())
    return replace(layers, **columns)


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
        cuts, note = self.layers.cuts_at(self.boundaries), self.layers.note
        request, layout = self.request, self.layout
        asked = request.pipeline_ranks, not (request.recompute or request.copies), not request.split_backward
        return Usage(cuts, layout.rows, layout.num_replicas, num_layers, note, *asked, self.layers.cuts)

    def recomputing(self, stages: Collection[int]) -> Candidate:
        """This candidate with exactly `stages` recomputed."""
        return replace(self, recomputed=frozenset(stages))

    @cached_property
    def costs(self) -> Costs:
        """Costs of each stage of one copy of the model, on its rank. Raises PlacementError."""
        costs = self.measured or self.layers.stages(
            self.boundaries, split_backward=self.splits_backward, recompute=self.recomputed
        )
        if any(self.layers.snapshot_bytes):
            costs = costs.with_snapshots()
        slowdowns = self.request.machine.slowdowns_of(self.layout.num_ranks, self.layout.num_replicas)
        factors = [slowdowns[rank] for rank in self.layout.ranks[: self.layout.num_stages]]
        times = {name: getattr(costs, name) for name in _TIMES}
        columns: dict[str, Any] = {name: _slowed(us, factors) for name, us in times.items() if us is not None}
        return replace(costs, **columns, reduce_us=self._reduce_us())

    def _reduce_us(self) -> tuple[int, ...]:
        """For each stage: replicas sum their gradients, and so do the two copies of a stage in a bidirectional plan."""
        machine, n, replicas = self.request.machine, self.layout.num_ranks, self.layout.num_replicas
        times = []
        for stage, (a, b) in enumerate(pairwise(self.boundaries)):
            holders = [*machine.holders(n, replicas, self.layout.ranks[stage])]
            if self.layout.has_copies:
                holders += machine.holders(n, replicas, n - 1 - stage)
            times.append(machine.reduce_us(sum(self.layers.gradient_bytes[a:b]), sorted(holders)))
        return tuple(times)

    @cached_property
    def placement(self) -> Placement:
        """Tasks and edges of one micro-batch. Raises PlacementError."""
        cluster = self.request.machine.cluster(self.layout.num_ranks, self.layout.num_replicas)
        if self.layout.has_copies:
            return bidirectional(self.costs, cluster)
        placement = place(self.costs, cluster, self.layout.ranks)
        return placement.forward_only() if self.request.inference else placement


_TIMES = ("forward_us", "backward_us", "weight_us", "recompute_us", "optimizer_us", "spread_us")


def _slowed(times_us: Sequence[int | None], factors: Sequence[float]) -> tuple[int | None, ...]:
    """Times multiplied by each stage's factor, as whole µs, rounded up."""
    return tuple(
        None if us is None else us if factor == 1 else math.ceil(us * factor)
        for us, factor in zip(times_us, factors, strict=True)
    )
