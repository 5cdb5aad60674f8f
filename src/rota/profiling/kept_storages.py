"""Which storages a layer keeps, by identity: if two layers of a stage keep the same storage, the stage keeps it once.

A storage that crosses a boundary has a name. A value's name is its own address in the pass through the layers: a layer
that passes on a received value, or a view of it, passes on the name. A gradient's name is its edge and position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch

from rota.core.layers import Shared
from rota.models import StageEdge
from rota.profiling.peak_memory import StorageWatch, copier
from rota.profiling.stage_run import StageRun, tensors_of
from rota.runtime.gradients.forward_backward import Kept
from rota.runtime.gradients.split_backward import WeightWork
from rota.runtime.memory_watch import LiveStorages
from rota.runtime.messages import over_tensors
from rota.torch_internals import StorageReference, address_of

Name: TypeAlias = Hashable


@dataclass(slots=True)
class Held:
    """Bytes of storages with a name, by name, and of all others together."""

    named: dict[Name, int] = field(default_factory=dict)
    private: int = 0

    @property
    def total(self) -> int:
        """Bytes of all storages, named or not."""
        return self.private + sum(self.named.values())


@dataclass(slots=True)
class KeptStorages:
    """What a layer keeps after F, and still after I; `same`: pairs of gradients with one storage, passed on."""

    kept: Held
    waiting: Held
    same: list[tuple[Name, Name]]


@final
class _Named:
    """Storages by name; while it exists, no other storage gets one of their addresses."""

    def __init__(self) -> None:
        self._places: dict[Name, tuple[int, StorageReference]] = {}

    def add(self, name: Name, tensor: torch.Tensor) -> Name:
        """Name a tensor's storage; returns its name, which is an older one if it has one."""
        address = address_of(storage := tensor.untyped_storage())
        for older, (place, _) in self._places.items():
            if place == address:
                return older
        self._places[name] = address, StorageReference(storage)
        return name

    def held(self, alive: dict[int, int]) -> Held:
        named = {name: alive[at] for name, (at, _) in self._places.items() if at in alive}
        return Held(named, sum(alive.values()) - sum(named.values()))


def kept_storages_of(stage_run: StageRun) -> KeptStorages:
    """What a layer with a split backward keeps; its inputs are kept only if it saved them."""
    watch, named = StorageWatch(), _Named()
    with watch, torch.autograd.set_multithreading_enabled(False):  # a thread of a device frees its tensors late
        kept = _forward(stage_run, watch.live, named)
        held = named.held(watch.live.alive())
        work, same = _input_backward(stage_run, kept, named)
        del kept
        waiting = named.held(watch.live.alive())
        del work
    return KeptStorages(held, waiting, same)


def place_of(tensor: torch.Tensor) -> Name:
    """The name of a tensor of the pass through the layers."""
    return address_of(tensor.untyped_storage())


def gradient_of(edge: StageEdge, position: int) -> Name:
    """The name of a gradient along `edge`, by `position` among the value's tensors that need one."""
    return "gradient", edge.source, edge.target, position


def _forward(stage_run: StageRun, live: LiveStorages, named: _Named) -> Kept:
    copy = copier(contiguous=False)
    received = [over_tensors(copy, value) for value in stage_run.received]
    live.see(received)
    _name_values(named, received, stage_run.received)
    _, values, kept = stage_run.forward(received)
    _name_values(named, values, stage_run.values)
    return kept


def _name_values(named: _Named, values: list[Any], of_the_pass: list[Any]) -> None:
    for value, original in zip(values, of_the_pass, strict=True):
        for tensor, like in zip(tensors_of(value), tensors_of(original), strict=True):
            named.add(place_of(like), tensor)


def _input_backward(
    stage_run: StageRun, kept: Kept, named: _Named
) -> tuple[WeightWork | None, list[tuple[Name, Name]]]:
    stages, stage = stage_run.workload.stages, stage_run.stage
    gradients = [[*map(torch.clone, arriving)] for arriving in stage_run.gradients]
    outgoing = stages.outgoing(stage)
    for edge, arriving in zip(outgoing, gradients if outgoing else (), strict=True):
        for i, gradient in enumerate(arriving):
            named.add(gradient_of(edge, i), gradient)
    returned, work = stage_run.backward(kept, gradients)
    same = []
    for edge, sent in zip(stages.incoming(stage), returned, strict=True):
        for i, tensor in enumerate(sent):
            name = gradient_of(edge, i)
            if tensor is not None and (older := named.add(name, tensor)) != name:
                same.append((name, older))
    return work, same


def sharing(sizes: Iterable[Mapping[Name, int]]) -> tuple[Shared, ...]:
    """(a, b, bytes) for what layers a and b have, but no layer between. `sizes`: of what each layer has, by name."""
    last: dict[Name, int] = {}
    shared: Counter[tuple[int, int]] = Counter()
    for layer, sizes_of_layer in enumerate(sizes):
        for name, num_bytes in sizes_of_layer.items():
            if name in last:
                shared[last[name], layer] += num_bytes
            last[name] = layer
    return tuple((*pair, num_bytes) for pair, num_bytes in sorted(shared.items()))


def one_name(same: Iterable[tuple[Name, Name]]) -> Callable[[Name], Name]:
    """A function that maps all names of the same storage to one of them."""
    root: dict[Name, Name] = {}

    def find(name: Name) -> Name:
        while name in root:
            name = root[name]
        return name

    for a, b in same:
        if (x := find(a)) != (y := find(b)):
            root[x] = y
    return find
