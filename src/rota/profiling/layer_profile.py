"""profile_layers and profile_model: a model's layers, measured or estimated, at one or several micro-batch sizes."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from rota.core.errors import EstimateError, PipelineError
from rota.core.layers import ESTIMATED, LayerCosts, Profile
from rota.core.text import count_text, time_text
from rota.models import StageEdge, Stages, finest, is_sequential
from rota.models.stages import holds
from rota.profiling.devices import DeviceModel, OtherPrograms, accelerators_of, device_named, place_name
from rota.profiling.kept_storages import Name, gradient_of, one_name, sharing
from rota.profiling.layer_measurement import Layer, ProfileOptions, called, measure_layers
from rota.profiling.missing_data import module_that_raised, why_not_estimated
from rota.profiling.profile_cache import ProfileCache, identity_of, inputs_of
from rota.profiling.stage_run import Workload, num_bytes, tensors_of
from rota.runtime.losses import LossFn

_DEFAULT = ProfileOptions()
# Changes where the same model would get other estimates.
_ESTIMATES = "3, without what is computed from the batch alone"


def profile_layers(
    model: nn.Module | Stages,
    batch: Any,
    target: Any = None,
    loss_fn: LossFn | None = None,
    options: ProfileOptions = _DEFAULT,
) -> LayerCosts:
    """Measure or estimate the costs of each layer for one micro-batch.

    Layers are measured in this process, one after another: on the CPU with one thread, on an accelerator by events,
    with full queues. Bytes are those of storages, exact either way; peaks leave out what a kernel allocates for itself,
    except on an accelerator. The caller's modules, gradients and random state are not touched.

    Args:
        model: The model, cut wherever it can be cut, or stages as layers.
        batch: Inputs of one micro-batch.
        target: Its targets.
        loss_fn: Computes the loss of an output and a target; None: the backward begins at the output.
        options: How to measure, or for which device to estimate.

    Returns:
        The layers' times in µs, bytes and edges.

    Raises:
        PipelineError: If a layer fails, with its contents, or if the cache is of another model, device or version.
        EstimateError: If a layer needs data, so that it cannot be estimated.

    Warns:
        UserWarning: The floating-point operations of an operator are unknown, so that only its bytes are counted.
    """
    rows = num_rows(batch)
    layers = profile_model(model, {rows: (batch, target)}.__getitem__, [rows], loss_fn, options)[rows]
    if layers.why_incomplete:
        warnings.warn(layers.why_incomplete, stacklevel=2)
    return layers


def profile_model(
    model: nn.Module | Stages,
    make_batch: Callable[[int], tuple[Any, Any]],
    rows: Iterable[int],
    loss_fn: LossFn | None = None,
    options: ProfileOptions = _DEFAULT,
) -> Profile:
    """Measure or estimate the costs of each layer for micro-batches of several sizes.

    Args:
        model: As in `profile_layers`.
        make_batch: Makes inputs and targets of one micro-batch, given its number of rows.
        rows: The numbers of rows; where time is limited, the most important first.
        loss_fn: As in `profile_layers`.
        options: As in `profile_layers`.

    Returns:
        The layers' costs, by number of rows.

    Raises:
        PipelineError: As in `profile_layers`, and for a batch with another number of rows.
    """
    began_s = time.monotonic()
    sizes = list(dict.fromkeys(rows))
    estimated_for = None if options.device is None else device_named(options.device)
    stages, names = _layers(model, sorted(sizes), make_batch, options.cuts)
    _refuse(stages, options.device)
    place = estimated_for.name if estimated_for is not None else place_name(stages)
    identity = identity_of(stages, loss_fn, options.optimizer) | {"device": place}
    if estimated_for is not None:
        identity["estimates"] = _ESTIMATES
    name = f"{len(model)}-stages" if isinstance(model, Stages) else type(model).__name__
    cached = ProfileCache.of(options.cache, f"{name}-{place}", identity, options.refresh)
    missing = [count for count in sizes if not cached.knows(count)]
    if missing:  # the smallest first: it is measured in any case
        is_limited = options.within_s < math.inf
        missing = [min(missing), *(n for n in missing if n > min(missing))] if is_limited else sorted(missing)
    took_s: dict[int, float] = {}  # of the sizes that were measured now
    for count in [*filter(cached.knows, sorted(sizes)), *missing]:
        expected_s = max((took * count / rows for rows, took in took_s.items()), default=0.0)
        if took_s and time.monotonic() - began_s + expected_s > options.within_s:
            break
        batch, target = make_batch(count)
        if (made := num_rows(batch)) != count:
            raise PipelineError(f"the batch for {count} rows has {made}; return {count}")
        inputs = {f"inputs of {count_text(count, 'row')}": inputs_of(batch, target)}
        if cached.has(count, inputs):
            options.report(f"{count_text(count, 'row')}: from {cached.path}")
            continue
        size_began_s, others = time.monotonic(), OtherPrograms()
        layers = _measured(Workload(stages, batch, target, loss_fn), options, estimated_for)
        how = f"{ESTIMATED} for {place}" if estimated_for else f"measured on {place}, one layer after another"
        costs = costs_of(stages, layers, names, count, how)
        if not estimated_for and not accelerators_of(stages):
            costs = replace(costs, missing_cores=round(others.missing_cores(1), 3))
        cached.add(costs, inputs)
        took_s[count] = time.monotonic() - size_began_s
    return cached.profile


def _measured(workload: Workload, options: ProfileOptions, estimated_for: DeviceModel | None) -> list[Layer]:
    layers: list[Layer] = []
    for layer in measure_layers(workload, options, estimated_for):
        times = " ".join(f"{k} {time_text(round(us))}" for k, us in zip("FB", layer.times_us, strict=False))
        launches = f"; {layer.launches}" if layer.launches else ""
        options.report(f"{called(workload.stages, len(layers))}: {times}{launches}")
        layers.append(layer)
    return layers


def _layers(
    model: nn.Module | Stages,
    sizes: list[int],
    make_batch: Callable[[int], tuple[Any, Any]],
    cuts: Iterable[str] | None,
) -> tuple[Stages, tuple[str, ...]]:
    """The model cut wherever it can be cut, and the names of these cuts; a batch shows where that is."""
    if isinstance(model, Stages) and cuts is None:
        return model, tuple(map(str, range(1, len(model))))
    if isinstance(model, Stages) or is_sequential(model) or not sizes:
        return finest(model, cuts=cuts)
    example, _ = make_batch(sizes[0])
    try:
        return finest(model, example, cuts)
    except Exception as error:
        if why := why_not_estimated(error):
            raise EstimateError(f"{module_that_raised(error) or type(model).__name__}: {why}") from error
        raise


def num_rows(batch: Any) -> int:
    """Number of rows of the first tensor in a batch. Raises PipelineError if there is none."""
    tensors = tensors_of(batch)
    if not tensors or not tensors[0].dim():
        raise PipelineError("the batch has no tensor with rows (dim 0); give one micro-batch as the model takes it")
    return tensors[0].size(0)


def _refuse(stages: Stages, device: str | None) -> None:
    backward = next((edge for edge in stages.edges if edge.source > edge.target), None)
    if backward is not None:
        raise PipelineError(f"edge {backward} leads back; number the stages in the order in which they run")
    tensors = {t for module in stages.modules for t in (*module.parameters(), *module.buffers())}
    if device is None and any(tensor.is_meta for tensor in tensors):
        raise PipelineError(
            "the model is on the meta device, which computes nothing; name one to estimate for: device="
        )


# --- measured layers as LayerCosts: storages that several layers keep are counted once --------------------------------


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
