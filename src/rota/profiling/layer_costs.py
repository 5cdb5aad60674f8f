"""Measured layers as LayerCosts: storages that several layers keep are counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from rota.core.layers import LayerCosts
from rota.models import StageEdge, Stages
from rota.models.stages import holds
from rota.profiling.kept_storages import Name, gradient_of, one_name, sharing
from rota.profiling.layer_measurement import Layer
from rota.profiling.stage_run import num_bytes


def costs_of(stages: Stages, layers: Sequence[Layer], cuts: tuple[str, ...], rows: int, note: str) -> LayerCosts:
    """The costs of `layers`, which are those of `stages`, in the same order."""
    modules, parameters = stages.modules, [[*module.parameters()] for module in stages.modules]
    forward, backward, input_us, weight_us, again = _columns(layer.times_us for layer in layers)
    peaks = _columns(layer.peaks for layer in layers)
    one_of = one_name(_same(stages, layers))
    edges = sorted(stages.edges, key=lambda edge: edge[:2])
    sizes = {
        edge: size
        for s, layer in enumerate(layers)
        for edge, *size in zip(stages.outgoing(s), *layer.sizes, strict=True)
    }
    return LayerCosts(
        rows=rows,
        cuts=cuts,
        forward_us=forward,
        backward_us=backward,
        input_us=input_us,
        weight_us=weight_us,
        recompute_us=again,
        optimizer_us=tuple(round(layer.optimizer.us) for layer in layers),
        kept_bytes=tuple(layer.storages.kept.total for layer in layers),
        waiting_bytes=tuple(layer.storages.waiting.total for layer in layers),
        changed_bytes=tuple(layer.changed_bytes for layer in layers),
        forward_peak_bytes=peaks[0],
        backward_peak_bytes=peaks[1],
        input_peak_bytes=peaks[2],
        weight_peak_bytes=peaks[3],
        parameter_bytes=tuple(num_bytes(weights) for weights in parameters),
        gradient_bytes=tuple(num_bytes([p for p in weights if p.requires_grad]) for weights in parameters),
        buffer_bytes=tuple(num_bytes(module.buffers()) for module in modules),
        optimizer_bytes=tuple(sum(layer.optimizer.bytes_of) for layer in layers),
        edges=tuple(edge[:2] for edge in edges),
        boundary_bytes=tuple(sizes[edge][0] for edge in edges),
        boundary_gradient_bytes=tuple(sizes[edge][1] for edge in edges),
        received_bytes=tuple(_kept_by_no_layer(edge, stages, layers) for edge in edges),
        shared=sharing(layer.storages.kept.named for layer in layers),
        waiting_shared=sharing(
            {one_of(name): size for name, size in layer.storages.waiting.named.items()} for layer in layers
        ),
        tied=sharing(map(_bytes_of, parameters, layers)),
        spread=tuple(layer.spread for layer in layers),
        note=note,
        uncounted=tuple((number, name) for number, layer in enumerate(layers) for name in layer.uncounted),
        contents=tuple(map(holds, modules)),
    )


def _columns(rows: Iterable[Sequence[float]]) -> list[tuple[int, ...]]:
    return [tuple(map(round, column)) for column in zip(*rows, strict=True)]


def _kept_by_no_layer(edge: StageEdge, stages: Stages, layers: Sequence[Layer]) -> int:
    """Bytes that arrive along `edge`, need a gradient, and are kept by no layer that gets them there."""
    received = layers[edge.target].received[stages.incoming(edge.target).index(edge)]
    not_kept = {name: size for name, size in received if not _keeps(edge.target, name, stages, layers)}
    return sum(not_kept.values())


def _keeps(layer: int, name: Name, stages: Stages, layers: Sequence[Layer]) -> bool:
    """Whether the layer, or one that it passes the value on to, keeps it."""
    if name in layers[layer].storages.kept.named:
        return True
    sent = zip(stages.outgoing(layer), layers[layer].sent, strict=True)
    return any(name in names and _keeps(edge.target, name, stages, layers) for edge, names in sent)


def _same(stages: Stages, layers: Sequence[Layer]) -> list[tuple[Name, Name]]:
    """Pairs of gradients with one storage within a stage, except those of values with several readers: a sum is new."""
    readers = Counter(name for layer in layers for names in layer.sent for name in names)
    summed = {
        gradient_of(edge, i)
        for s, layer in enumerate(layers)
        for edge, names in zip(stages.outgoing(s), layer.sent, strict=True)
        for i, name in enumerate(names)
        if readers[name] > 1
    }
    return [(a, b) for layer in layers for a, b in layer.storages.same if a not in summed]


def _bytes_of(parameters: Sequence[nn.Parameter], layer: Layer) -> dict[Name, int]:
    """The bytes of each parameter of a layer, with its gradient and its optimizer state."""
    return {
        parameter: (1 + parameter.requires_grad) * parameter.nbytes + state_bytes
        for parameter, state_bytes in zip(parameters, layer.optimizer.bytes_of, strict=True)
    }
