"""Costs of a model's layers, measured or estimated once, and from them the costs of any stages; profiles of them.

A layer is what is between two adjacent places where the model may be cut. Stages are runs of layers, so one profile of
the layers gives the costs of every cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Annotated, Any, TypeAlias, final

import msgspec
from msgspec import Meta

from rota.core import reading
from rota.core.costs import NUM_SNAPSHOTS, Costs
from rota.core.errors import PlacementError
from rota.core.reading import Name, Positive, Whole, whole
from rota.core.text import angle_repr, count_text, time_text

_Pair: TypeAlias = tuple[int, int]
Shared: TypeAlias = tuple[Whole, Whole, Whole]
_Fraction: TypeAlias = Annotated[float, Meta(ge=0, lt=1e9)]

_MOST_MISSING_CORES, _MOST_SPREAD = 0.1, 0.2  # above which a measurement is doubtful

_MOST_NAMED = 3  # layers in a warning

#: A note of costs begins with this where nothing was measured.
ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Time and memory of one micro-batch in each of n layers.

    Each field has one entry per layer, or per edge where it says so. Of these, `*_us` are times in µs, `*_bytes` sizes.

    Attributes:
        rows: Examples in the micro-batch.
        cuts: Names of the n - 1 places between the layers, as `rota.split` takes them.
        forward_us: Time of F.
        backward_us: Time of B, the whole backward.
        input_us: Time of I.
        weight_us: Time of W.
        recompute_us: Time of the forward under recomputation.
        optimizer_us: Time of the optimizer step.
        kept_bytes: Storages that F keeps for the backward, without parameters and the batch.
        waiting_bytes: What I leaves for W.
        forward_peak_bytes: Additional bytes while F runs.
        backward_peak_bytes: Additional bytes while B runs.
        input_peak_bytes: Additional bytes while I runs.
        weight_peak_bytes: Additional bytes while W runs.
        parameter_bytes: Parameters; always held.
        gradient_bytes: Gradients of the trainable parameters; always held.
        buffer_bytes: Buffers; always held.
        optimizer_bytes: Optimizer state; always held.
        snapshot_bytes: Bytes for the states that `rota run --max-restarts` keeps in memory; always held. Empty: not
            counted, see `with_snapshots`.
        edges: (source, target) layers.
        boundary_bytes: Bytes sent forward, per edge.
        boundary_gradient_bytes: Bytes sent backward, per edge.
        received_bytes: Per edge, the received bytes that a whole backward holds, although neither the layer that reads
            them nor the layers that get them through it keep them.
        changed_bytes: Buffers that F changes; a recomputed F keeps their old values.
        shared: (a, b, bytes) of what layer b keeps and an earlier layer a keeps too: in one stage it counts once.
        waiting_shared: The same for what is left for W.
        tied: The same for what is always held.
        spread: Relative interquartile range of the measured F + B.
        note: Where the numbers come from.
        missing_cores: How many of the cores that measuring used other programs took away, on average.
        contents: Names of what each layer holds, such as "layers.9, norm, output"; empty: unknown.
        uncounted: (layer, operator) of operators whose floating-point operations an estimate does not know.

    Raises:
        PlacementError: A field has the wrong number of entries, a number is negative or not whole, or an edge or a
            pair does not go from a layer to a later one.
    """

    rows: Positive
    cuts: tuple[Name, ...]
    forward_us: tuple[Whole, ...]
    backward_us: tuple[Whole, ...]
    input_us: tuple[Whole, ...]
    weight_us: tuple[Whole, ...]
    recompute_us: tuple[Whole, ...]
    optimizer_us: tuple[Whole, ...]
    kept_bytes: tuple[Whole, ...]
    waiting_bytes: tuple[Whole, ...]
    forward_peak_bytes: tuple[Whole, ...]
    backward_peak_bytes: tuple[Whole, ...]
    input_peak_bytes: tuple[Whole, ...]
    weight_peak_bytes: tuple[Whole, ...]
    parameter_bytes: tuple[Whole, ...]
    gradient_bytes: tuple[Whole, ...]
    buffer_bytes: tuple[Whole, ...]
    optimizer_bytes: tuple[Whole, ...]
    edges: tuple[tuple[Whole, Whole], ...]
    boundary_bytes: tuple[Whole, ...]
    boundary_gradient_bytes: tuple[Whole, ...]
    received_bytes: tuple[Whole, ...]
    changed_bytes: tuple[Whole, ...] = ()
    snapshot_bytes: tuple[Whole, ...] = ()
    shared: tuple[Shared, ...] = ()
    waiting_shared: tuple[Shared, ...] = ()
    tied: tuple[Shared, ...] = ()
    spread: tuple[_Fraction, ...] = ()
    note: str = ""
    missing_cores: _Fraction = 0.0
    contents: tuple[str, ...] = ()
    uncounted: tuple[tuple[Whole, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.forward_us:
            raise PlacementError("forward_us is empty: a model has at least one layer")
        if len(self.cuts) != self.num_layers - 1:
            raise PlacementError(
                f"cuts has {len(self.cuts)} names for {self.num_layers} layers; give one per pair of neighbours"
            )
        if len(self.contents) not in (0, self.num_layers):
            raise PlacementError(f"contents has {len(self.contents)} entries, expected {self.num_layers}")
        for name in ("changed_bytes", "snapshot_bytes"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * self.num_layers)
        for name in (field.name for field in fields(self) if field.name.endswith(("_us", "_bytes"))):
            column, count = getattr(self, name), len(self.edges) if name in _BY_EDGE else self.num_layers
            if len(column) != count:
                raise PlacementError(f"{name} has {len(column)} entries, expected {count}")
            object.__setattr__(self, name, tuple(whole(f"{name}[{i}]", entry) for i, entry in enumerate(column)))
        pairs = [entry[:2] for entry in (*self.shared, *self.waiting_shared, *self.tied)]
        for layer, operator in self.uncounted:
            if not 0 <= layer < self.num_layers:
                raise PlacementError(f"uncounted has {operator!r} in layer {layer}, and there are {self.num_layers}")
        for a, b in [*self.edges, *pairs]:
            if not 0 <= a < b < self.num_layers:
                raise PlacementError(f"({a}, {b}) must join a layer to a later one of the {self.num_layers}")

    def __str__(self) -> str:
        """One line."""
        sizes = f"{count_text(self.num_layers, 'layer')}, {count_text(self.rows, 'row')} per micro-batch"
        return f"LayerCosts of {sizes}: F {time_text(sum(self.forward_us))}, B {time_text(sum(self.backward_us))}"

    __repr__ = angle_repr

    @property
    def mean_spread(self) -> float:
        """How far measured times of a layer are apart, weighted by these times; 0.0 if nothing says so."""
        times_us = [f + b for f, b in zip(self.forward_us, self.backward_us, strict=True)]
        if not self.spread or not any(times_us):
            return 0.0
        return sum(us * spread for us, spread in zip(times_us, self.spread, strict=True)) / sum(times_us)

    @property
    def why_doubtful(self) -> str:
        """What shows that the machine was busy or uneven while the layers were measured; "" if nothing does."""
        if self.missing_cores > _MOST_MISSING_CORES:
            return f"other programs took {self.missing_cores:.1f} of the cores"
        if self.mean_spread > _MOST_SPREAD:
            return f"repeated timings of a layer vary by {self.mean_spread:.0%} (interquartile range)"
        return ""

    @property
    def why_incomplete(self) -> str:
        """Which operators an estimate counts too low, in which layers, and what to do; "" if there are none."""
        if not self.uncounted:
            return ""
        layers_of: dict[str, list[str]] = {}
        for layer, operator in self.uncounted:
            held = f" ({self.contents[layer]})" if self.contents else ""
            layers_of.setdefault(operator, []).append(f"{layer + 1}{held}")
        operators = "; ".join(f"{operator} in {_layers_text(layers)}" for operator, layers in layers_of.items())
        return (
            "the floating-point operations of some operators are unknown, so only the bytes that they move count: "
            f"{operators}. Register them by torch.utils.flop_counter.register_flop_formula in the model's file, or "
            "measure on the device itself"
        )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.forward_us)

    @property
    def static_bytes(self) -> tuple[int, ...]:
        """Bytes that each layer always holds: parameters, gradients, buffers, optimizer state, counted snapshots."""
        return tuple(map(sum, zip(self.state_bytes, self.gradient_bytes, self.snapshot_bytes, strict=True)))

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """What a checkpoint holds of each layer: parameters, buffers and optimizer state."""
        columns = self.parameter_bytes, self.buffer_bytes, self.optimizer_bytes
        return tuple(map(sum, zip(*columns, strict=True)))

    def with_snapshots(self) -> LayerCosts:
        """The same layers with the states that `rota run --max-restarts` keeps in memory.

        Tied parameters count with each layer, also where one stage has both.
        """
        return replace(self, snapshot_bytes=tuple(NUM_SNAPSHOTS * size for size in self.state_bytes))

    def cuts_at(self, boundaries: Sequence[int]) -> tuple[str, ...]:
        """Names of the cuts between the stages of `boundaries`."""
        return tuple(self.cuts[boundary - 1] for boundary in boundaries[1:-1])

    def stages(
        self, boundaries: Sequence[int], *, split_backward: bool = False, recompute: Collection[int] = ()
    ) -> Costs:
        """Costs of stages that are runs of layers.

        Times add up. Bytes add up, except that what layers share counts once. The highest peak of a layer counts. If
        the backward is split, a stage whose inputs need no gradients has no I: its W is the whole backward.

        Args:
            boundaries: Stage i has the layers boundaries[i] to boundaries[i + 1] - 1.
            split_backward: Whether the stages have I and W instead of B.
            recompute: The stages that recompute: they keep only what they receive, and old values of changed buffers.

        Raises:
            PlacementError: The boundaries do not rise from 0 to the number of layers.
        """
        if boundaries[0] != 0 or boundaries[-1] != self.num_layers or any(b <= a for a, b in pairwise(boundaries)):
            raise PlacementError(f"boundaries are {list(boundaries)}; they must rise from 0 to {self.num_layers}")
        parts = [*pairwise(boundaries)]

        def total(name: str) -> tuple[int, ...]:
            column = getattr(self, name)
            return tuple(sum(column[a:b]) for a, b in parts)

        crossing, received, unkept = self._crossing(boundaries)
        held = self._once("kept_bytes", "shared", boundaries)
        if not split_backward:
            held = [kept + alone for kept, alone in zip(held, unkept, strict=True)]
        old = [changed if s in recompute else 0 for s, changed in enumerate(total("changed_bytes"))]
        checkpoints = [a + b for a, b in zip(received, old, strict=True)]
        for stage in recompute:  # R computes with the old values of the buffers
            held[stage] = max(held[stage] + old[stage], checkpoints[stage])
        again_us = total("recompute_us")
        edges = sorted(crossing)
        unsplit = {"backward_us": total("backward_us"), "backward_peak_bytes": self._backward_peaks(boundaries)}
        return Costs(
            forward_us=total("forward_us"),
            activation_bytes=tuple(held),
            boundary_bytes=tuple(crossing[edge][0] for edge in edges),
            gradient_bytes=tuple(crossing[edge][1] for edge in edges),
            forward_peak_bytes=self._forward_peaks(boundaries, recompute),
            static_bytes=tuple(self._once("static_bytes", "tied", boundaries)),
            state_bytes=total("state_bytes"),
            snapshot_bytes=total("snapshot_bytes"),
            optimizer_us=total("optimizer_us"),
            recompute_us=tuple(us if s in recompute else None for s, us in enumerate(again_us)) if recompute else None,
            checkpoint_bytes=tuple(min(*pair) for pair in zip(checkpoints, held, strict=True)),
            edges=tuple(edges),
            note=self.note,
            microbatch_rows=self.rows,
            **(self._split(boundaries, crossing, held, old) if split_backward else unsplit),
        )

    def _split(
        self, boundaries: Sequence[int], crossing: dict[_Pair, list[int]], held: Sequence[int], old: Sequence[int]
    ) -> dict[str, tuple[int, ...]]:
        """Times, peaks and freed bytes of I and W, instead of B's."""
        waiting, rows = self._once("waiting_bytes", "waiting_shared", boundaries), []
        peaks_of_b = self._backward_peaks(boundaries)
        for stage, (a, b) in enumerate(pairwise(boundaries)):
            if any(pair[1] == stage and sizes[1] for pair, sizes in crossing.items()):
                left = waiting[stage] + old[stage]
                # I frees nothing before its end: all that it keeps for W comes on top of what F kept.
                needed_by_input = sum(map(self._input_peak, range(a, b))) - max(left - held[stage], 0)
                times = sum(self.input_us[a:b]), sum(self.weight_us[a:b])
                peaks = max(needed_by_input, 0), max(self.weight_peak_bytes[a:b])
            else:
                left = held[stage] + sum(sizes[1] for pair, sizes in crossing.items() if pair[0] == stage)
                times, peaks = (0, sum(self.backward_us[a:b])), (0, peaks_of_b[stage])
            rows.append((*times, *peaks, held[stage] - left))
        names = "backward_us", "weight_us", "backward_peak_bytes", "weight_peak_bytes", "input_frees_bytes"
        return dict(zip(names, zip(*rows, strict=True), strict=True))

    def _input_peak(self, layer: int) -> int:
        """Peak of this layer's I in addition to what F kept."""
        return self.input_peak_bytes[layer] + max(self.waiting_bytes[layer] - self.kept_bytes[layer], 0)

    def _forward_peaks(self, boundaries: Sequence[int], recompute: Collection[int]) -> tuple[int, ...]:
        """Each stage's highest layer, with received bytes that it does not keep; if recomputed, with those it keeps."""
        alone = self._within(boundaries, self.received_bytes, 1)
        columns = zip(alone, self.forward_peak_bytes, self.kept_bytes, strict=True)
        needed = [(got + peak, got + peak + kept) for got, peak, kept in columns]
        return tuple(max(e[s in recompute] for e in needed[a:b]) for s, (a, b) in enumerate(pairwise(boundaries)))

    def _backward_peaks(self, boundaries: Sequence[int]) -> tuple[int, ...]:
        """Each stage's highest layer, with the gradients that it receives."""
        gradients = self._within(boundaries, self.boundary_gradient_bytes, 0)
        needed = [got + peak for got, peak in zip(gradients, self.backward_peak_bytes, strict=True)]
        return tuple(max(needed[a:b]) for a, b in pairwise(boundaries))

    def _within(self, boundaries: Sequence[int], column: Sequence[int], end: int) -> list[int]:
        """Per layer the bytes along edges within a stage, counted at their source (`end` 0) or target (1)."""
        sums = [0] * self.num_layers
        for edge, size in zip(self.edges, column, strict=True):
            if bisect_right(boundaries, edge[0]) == bisect_right(boundaries, edge[1]):
                sums[edge[end]] += size
        return sums

    def _crossing(self, boundaries: Sequence[int]) -> tuple[dict[_Pair, list[int]], list[int], list[int]]:
        """Edge of stages -> bytes [forward, backward]; per stage the bytes received, and those that no layer keeps."""
        stage = [bisect_right(boundaries, layer) - 1 for layer in range(self.num_layers)]
        # What several layers of a stage read from one layer arrives once, and is kept if one of them keeps it.
        arriving: dict[_Pair, tuple[int, int, int]] = {}  # (source layer, target stage) -> bytes
        columns = self.boundary_bytes, self.boundary_gradient_bytes, self.received_bytes
        for (source, target), forward, back, alone in zip(self.edges, *columns, strict=True):
            if stage[source] != stage[target]:
                sizes = arriving.get((source, stage[target]), (0, 0, alone))
                arriving[source, stage[target]] = max(sizes[0], forward), max(sizes[1], back), min(sizes[2], alone)
        crossing: dict[_Pair, list[int]] = {}
        received, unkept = [0] * (len(boundaries) - 1), [0] * (len(boundaries) - 1)
        for (source, to), (forward, back, alone) in arriving.items():
            sums = crossing.setdefault((stage[source], to), [0, 0])
            sums[0] += forward
            sums[1] += back
            received[to] += forward
            unkept[to] += alone
        return crossing, received, unkept

    def _once(self, name: str, pairs: str, boundaries: Sequence[int]) -> list[int]:
        """Sums per stage, in which what two layers of a stage share counts once."""
        column, shared = getattr(self, name), getattr(self, pairs)
        sums = [sum(column[a:b]) for a, b in pairwise(boundaries)]
        for a, b, size in shared:
            stage = bisect_right(boundaries, a) - 1
            if b < boundaries[stage + 1]:
                sums[stage] -= size
        return sums

    def to_fields(self) -> dict[str, Any]:
        """The fields in JSON."""
        return {name: value for name, value in asdict(self).items() if name not in _OMITTED or value}

    def to_json(self) -> str:
        """The text of a "layers" file, one line per field, which `from_json` reads."""
        return reading.dump("layers", self.to_fields(), LayerCosts.from_json)

    @classmethod
    def from_json(cls, text: str) -> LayerCosts:
        """Read what `to_json` wrote. Raises FormatError or PlacementError, which name the field."""
        return reading.parse(text, "layers").read(cls)


def _layers_text(layers: Sequence[str]) -> str:
    more = f" and {len(layers) - _MOST_NAMED} more" if len(layers) > _MOST_NAMED else ""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(layers[:_MOST_NAMED])}{more}"


_OMITTED = ("missing_cores", "contents", "uncounted")  # in JSON, if they say nothing
_BY_EDGE = ("boundary_bytes", "boundary_gradient_bytes", "received_bytes")


# --- profiles ---------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Profile(Mapping[int, LayerCosts]):
    """A mapping from the number of rows to the costs of the model's layers.

    Attributes:
        layers: One entry per number of rows, in ascending order. All entries have the same cuts.
        key: (name, value) of the conditions: model, inputs, device, versions. If one of them has changed, the profile
            is stale.

    Raises:
        PlacementError: There is no entry, a number of rows appears twice, or the cuts differ.
    """

    layers: tuple[LayerCosts, ...]
    key: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlacementError("layers is empty: a profile needs the layers at one micro-batch size or more")
        ordered = tuple(sorted(self.layers, key=lambda layers: layers.rows))
        object.__setattr__(self, "layers", ordered)
        if len({layers.rows for layers in ordered}) < len(ordered):
            raise PlacementError(f"layers has {reading.short(list(self))} rows: give each number of rows once")
        for layers in ordered[1:]:
            if layers.cuts != ordered[0].cuts:
                raise PlacementError(
                    f"layers of {layers.rows} rows have other cuts than those of {ordered[0].rows}: a profile is for "
                    "one model"
                )

    def __str__(self) -> str:
        """One line."""
        rows = ", ".join(map(str, [*self][:4])) + ("" if len(self) <= 4 else f", … {[*self][-1]}")
        return f"Profile of {count_text(self.layers[0].num_layers, 'layer')} at {rows} rows per micro-batch"

    __repr__ = angle_repr

    def __getitem__(self, rows: int) -> LayerCosts:
        for layers in self.layers:
            if layers.rows == rows:
                return layers
        raise KeyError(rows)

    def __iter__(self) -> Iterator[int]:
        return (layers.rows for layers in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def with_layers(self, layers: LayerCosts, key: Mapping[str, str]) -> Profile:
        """This profile with the entry for `layers.rows` added or replaced, and its key updated by `key`."""
        others = tuple(entry for entry in self.layers if entry.rows != layers.rows)
        return Profile((*others, layers), tuple({**dict(self.key), **key}.items()))

    def to_json(self) -> str:
        """The text of a "profile" file, one line per number of rows, which `from_json` reads."""
        fields: dict[str, Any] = {"key": dict(self.key), "layers": [layers.to_fields() for layers in self.layers]}
        return reading.dump("profile", fields, Profile.from_json)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what `to_json` wrote. Raises FormatError or PlacementError, which name the field."""
        file = reading.parse(text, "profile").read(ProfileFile)
        return cls(file.layers, tuple(file.key.items()))


class ProfileFile(msgspec.Struct):
    """A profile in JSON."""

    key: dict[str, str]
    layers: Annotated[tuple[LayerCosts, ...], Meta(min_length=1)]
