"""What a model's layers take, measured or estimated once, and the costs of any stages made of them.

A layer is what lies between two neighbouring places where the model may be cut. Stages are runs of layers, so one
profile of the layers tells the costs of every cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from rota import reading
from rota.costs import Costs, whole
from rota.errors import PlacementError


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """One micro-batch of `rows` rows through each of n layers; entries are by layer, or by edge where they say so.

    `cuts`: the names of the n - 1 places between them, as `rota.split` takes them. `backward_us` is B, whole;
    `input_us` and `weight_us` are I and W; `recompute_us` is the forward under recomputation.

    `kept_bytes`: storages that F keeps for the backward, parameters and the batch left out; `waiting_bytes`: what I
    leaves for W. `shared`: (a, b, bytes) where layer b keeps storages that a, the layer before it to do so, keeps too: in one
    stage they count once. `*_peak_bytes` are needed on top while F, B, I and W run.

    `edges` are (source, target) layers; `boundary_bytes` and `boundary_gradient_bytes` travel along them, and
    `received_bytes` are those of what arrives that a whole backward holds though no layer keeps it.

    `parameter_bytes`, `gradient_bytes` (of trainable ones), `buffer_bytes` and `optimizer_bytes` are there always.
    `spread`: how far apart the measured F + B were, as a part of their median (quarter to three quarters).
    """

    rows: int
    cuts: tuple[str, ...]
    forward_us: tuple[int, ...]
    backward_us: tuple[int, ...]
    input_us: tuple[int, ...]
    weight_us: tuple[int, ...]
    recompute_us: tuple[int, ...]
    optimizer_us: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    waiting_bytes: tuple[int, ...]
    forward_peak_bytes: tuple[int, ...]
    backward_peak_bytes: tuple[int, ...]
    input_peak_bytes: tuple[int, ...]
    weight_peak_bytes: tuple[int, ...]
    parameter_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    optimizer_bytes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    boundary_bytes: tuple[int, ...]
    boundary_gradient_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    shared: tuple[tuple[int, int, int], ...] = ()
    spread: tuple[float, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if not self.forward_us:
            raise PlacementError("forward_us is empty: a model has at least one layer")
        if len(self.cuts) != self.num_layers - 1:
            raise PlacementError(f"cuts has {len(self.cuts)} names for {self.num_layers} layers; one lies between two")
        for name in _BY_LAYER + _BY_EDGE:
            column, count = getattr(self, name), len(self.edges) if name in _BY_EDGE else self.num_layers
            if len(column) != count:
                raise PlacementError(f"{name} has {len(column)} entries, expected {count}")
            object.__setattr__(self, name, tuple(whole(f"{name}[{i}]", entry) for i, entry in enumerate(column)))
        for a, b in [*self.edges, *(entry[:2] for entry in self.shared)]:
            if not 0 <= a < b < self.num_layers:
                raise PlacementError(f"({a}, {b}) must join a layer to a later one of the {self.num_layers}")

    @property
    def num_layers(self) -> int:
        return len(self.forward_us)

    @property
    def static_bytes(self) -> tuple[int, ...]:
        """Of each layer: parameters, their gradients, buffers and the optimizer's state."""
        columns = self.parameter_bytes, self.gradient_bytes, self.buffer_bytes, self.optimizer_bytes
        return tuple(map(sum, zip(*columns, strict=True)))

    def cuts_at(self, boundaries: Sequence[int]) -> tuple[str, ...]:
        """The names of the cuts that make the stages of `boundaries`."""
        return tuple(self.cuts[boundary - 1] for boundary in boundaries[1:-1])

    def stages(
        self, boundaries: Sequence[int], *, split_backward: bool = False, recompute: Collection[int] = ()
    ) -> Costs:
        """Costs of the stages that have the layers boundaries[i] to boundaries[i + 1] - 1.

        The stages in `recompute` keep nothing but what they receive. Times add up, and bytes but for what is shared;
        peaks are those of the highest layer. Raises PlacementError for a stage without layers.
        """
        if boundaries[0] != 0 or boundaries[-1] != self.num_layers or any(b <= a for a, b in pairwise(boundaries)):
            raise PlacementError(f"boundaries are {list(boundaries)}; they rise from 0 to {self.num_layers}")
        parts = [slice(*part) for part in pairwise(boundaries)]

        def total(name: str) -> tuple[int, ...]:
            column = getattr(self, name)
            return tuple(sum(column[part]) for part in parts)

        def most(name: str) -> tuple[int, ...]:
            column = getattr(self, name)
            return tuple(max(column[part]) for part in parts)

        crossing, received, unkept = self._crossing(boundaries)
        held = self._held(boundaries, [0] * len(parts) if split_backward else unkept)
        again = total("recompute_us")
        edges = sorted(crossing)
        waiting = tuple(min(w, h) for w, h in zip(total("waiting_bytes"), held, strict=True))
        static = self.static_bytes
        return Costs(
            forward_us=total("forward_us"),
            backward_us=total("input_us" if split_backward else "backward_us"),
            weight_us=total("weight_us") if split_backward else None,
            activation_bytes=tuple(held),
            input_frees_bytes=tuple(h - w for h, w in zip(held, waiting, strict=True)) if split_backward else None,
            boundary_bytes=tuple(crossing[edge][0] for edge in edges),
            gradient_bytes=tuple(crossing[edge][1] for edge in edges),
            forward_peak_bytes=most("forward_peak_bytes"),
            backward_peak_bytes=most("input_peak_bytes" if split_backward else "backward_peak_bytes"),
            weight_peak_bytes=most("weight_peak_bytes"),
            static_bytes=tuple(sum(static[part]) for part in parts),
            optimizer_us=total("optimizer_us"),
            recompute_us=tuple(us if s in recompute else None for s, us in enumerate(again)) if recompute else None,
            checkpoint_bytes=tuple(min(*pair) for pair in zip(received, held, strict=True)),
            edges=tuple(edges),
            note=self.note,
        )

    def _crossing(self, boundaries: Sequence[int]) -> tuple[dict[tuple[int, int], list[int]], list[int], list[int]]:
        """Bytes forward and back by edge of stages; by stage the bytes received, and those that no layer keeps."""
        stage = [bisect_right(boundaries, layer) - 1 for layer in range(self.num_layers)]
        crossing: dict[tuple[int, int], list[int]] = {}
        received, unkept = [0] * (len(boundaries) - 1), [0] * (len(boundaries) - 1)
        sent: set[tuple[int, int]] = set()  # what several layers of a stage read of one layer arrives once
        columns = self.boundary_bytes, self.boundary_gradient_bytes, self.received_bytes
        for (source, target), forward, back, alone in zip(self.edges, *columns, strict=True):
            pair = stage[source], stage[target]
            if pair[0] == pair[1] or (source, pair[1]) in sent:
                continue
            sent.add((source, pair[1]))
            sizes = crossing.setdefault(pair, [0, 0])
            sizes[0] += forward
            sizes[1] += back
            received[pair[1]] += forward
            unkept[pair[1]] += alone
        return crossing, received, unkept

    def _held(self, boundaries: Sequence[int], unkept: Sequence[int]) -> list[int]:
        held = [sum(self.kept_bytes[a:b]) + more for (a, b), more in zip(pairwise(boundaries), unkept, strict=True)]
        for a, b, size in self.shared:
            stage = bisect_right(boundaries, a) - 1
            if b < boundaries[stage + 1]:
                held[stage] -= size
        return held

    def to_fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_json(self) -> str:
        """One line a field; `from_json` reads it back."""
        return reading.dump("layers", self.to_fields())

    @classmethod
    def from_json(cls, text: str) -> LayerCosts:
        """Raises FormatError or PlacementError, naming the field."""
        return cls.from_fields(reading.parse(text, "layers"))

    @classmethod
    def from_fields(cls, document: reading.Field) -> LayerCosts:
        values: dict[str, Any] = {name: document[name].integers(0) for name in _BY_LAYER + _BY_EDGE}
        edges, shared = document["edges"], document["shared"]
        values["edges"] = tuple(_tuple(entry, 2) for entry in edges)
        values["shared"] = tuple(_tuple(entry, 3) for entry in shared)
        values["cuts"] = tuple(entry.text() for entry in document["cuts"])
        values["spread"] = tuple(_fraction(entry) for entry in document["spread"])
        return cls(rows=document["rows"].integer(1), note=document["note"].text(), **values)


def _tuple(entry: reading.Field, count: int) -> tuple[int, ...]:
    numbers = entry.integers(0)
    if len(numbers) != count:
        raise entry.wrong(f"{count} numbers")
    return numbers


def _fraction(entry: reading.Field) -> float:
    if not isinstance(entry.value, (int, float)) or isinstance(entry.value, bool) or not 0 <= entry.value < 1e9:
        raise entry.wrong("a number of 0 or more")
    return float(entry.value)


_BY_EDGE = ("boundary_bytes", "boundary_gradient_bytes", "received_bytes")
_BY_LAYER = (
    *("forward_us", "backward_us", "input_us", "weight_us", "recompute_us", "optimizer_us"),
    *("kept_bytes", "waiting_bytes"),
    *("forward_peak_bytes", "backward_peak_bytes", "input_peak_bytes", "weight_peak_bytes"),
    *("parameter_bytes", "gradient_bytes", "buffer_bytes", "optimizer_bytes"),
)
