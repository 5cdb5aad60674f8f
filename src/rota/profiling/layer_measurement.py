"""Measures the layers of a model one at a time, on the inputs that they get in the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from rota.core.errors import EstimateError, PipelineError, error_line
from rota.models import Stages
from rota.models.carving.copies import deep_copy
from rota.models.stages import holds
from rota.profiling.clocks import Clocks, Laps, Run, launch_text
from rota.profiling.devices import DeviceModel
from rota.profiling.kept_storages import KeptStorages, Name, kept_storages_of, place_of
from rota.profiling.missing_data import KnownNumbers, module_that_raised, why_not_estimated
from rota.profiling.peak_memory import peaks
from rota.profiling.roofline import Kernels, Roofline
from rota.profiling.stage_run import (
    MakeOptimizer,
    OptimizerCosts,
    StageRun,
    Workload,
    num_bytes,
    on_device_of,
    one_thread,
    optimizer_costs,
    tensors_of,
)
from rota.runtime.device.protocol import Device
from rota.torch_internals import StorageReference

Report: TypeAlias = Callable[[str], None]
#: Measures a run on the device of its layer.
Measure: TypeAlias = Callable[[Run, Device], Laps]

_RUN_NS = 5_000_000  # of one measurement: long compared with the clock's resolution; no other rank shares the core


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How layers are profiled.

    Attributes:
        optimizer: Makes an optimizer of a list of parameters; None: no optimizer.
        repeats: Number of measurements; their median counts.
        device: A name in `rota.profiling.DEVICES`: estimate the times from what each operation computes and moves
            there. Nothing is computed then, and the model may be on the meta device. None: measure on its own device.
        report: Called with a line of text for each layer.
        cache: A file, or a folder with one file per model, so that nothing is measured twice.
        refresh: Whether to measure again what the cache has.
        cuts: Where the model may be cut, by name or pattern, as `rota.split` takes them; None: wherever it can be.
        within_s: About how many seconds to measure for. The smallest size is measured first, and the others as long as
            they fit, by the time that it took for each row; the first one that does not ends them.
    """

    optimizer: MakeOptimizer | None = None
    repeats: int = 7
    device: str | None = None
    report: Report = lambda _: None
    cache: str | Path | None = None
    refresh: bool = False
    cuts: Iterable[str] | None = None
    within_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer as measured: `times_us` of F, B, I, W and R, `peaks` in bytes of F, B, I and W.

    `launches` is a `launch_text`. `uncounted`: operators of which an estimate knows only the bytes.
    `sizes`: bytes of values and of their gradients, by outgoing edge. For tensors that need a gradient, `received` has
    names and bytes by incoming edge, and `sent` names by outgoing edge.
    """

    times_us: list[float]
    spread: float
    launches: str
    peaks: list[int]
    storages: KeptStorages
    changed_bytes: int
    optimizer: OptimizerCosts
    sizes: tuple[list[int], list[int]]
    received: list[list[tuple[Name, int]]]
    sent: list[list[Name]]
    uncounted: tuple[str, ...] = ()


def measure_layers(workload: Workload, options: ProfileOptions, estimated_for: DeviceModel | None) -> Iterator[Layer]:
    """Measure each stage as a layer. The caller's modules, gradients and random state are not touched.

    Raises PipelineError if a layer fails, with its number and contents; EstimateError if it needs data.
    """
    stages, known = workload.stages, KnownNumbers()
    if estimated_for is not None:
        workload = workload._replace(batch=known.on_meta(workload.batch), target=known.on_meta(workload.target))
    outputs: dict[int, Any] = {}
    last_reader = {edge.source: max(e.target for e in stages.outgoing(edge.source)) for edge in stages.edges}
    names: list[StorageReference] = []  # addresses that are names must not be used again
    roofline = None if estimated_for is None else Roofline(estimated_for)
    clocks = Clocks()

    def measure(run: Run, device: Device) -> Laps:
        return (roofline or clocks.on(device)).timed(run, options.repeats, _RUN_NS, together=False)

    with one_thread(stages), nullcontext() if roofline is None else Kernels(roofline.device):
        for layer in range(len(stages)):
            with _named_in_errors(stages, layer):
                placed, move = on_device_of(layer, workload) if roofline is None else (workload, lambda value: value)
                received = [move(edge.take(outputs[edge.source])) for edge in stages.incoming(layer)]
                placed = placed._replace(stages=_with_a_copy(stages, layer, on_meta=roofline is not None))
                with nullcontext() if roofline is None else known:
                    measured, outputs[layer], values = _measured(placed, layer, received, options.optimizer, measure)
            names += [StorageReference(t.untyped_storage()) for value in values for t in tensors_of(value)]
            del received, placed, values
            outputs = {source: value for source, value in outputs.items() if last_reader.get(source, 0) > layer}
            yield measured if roofline is None else replace(measured, uncounted=roofline.take_uncounted())


def called(stages: Stages, layer: int) -> str:
    """The name of a layer in errors and reports: "layer 7 of 32 (blocks.6)"."""
    return f"layer {layer + 1} of {len(stages)} ({holds(stages[layer])})"


@contextmanager
def _named_in_errors(stages: Stages, layer: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if why := why_not_estimated(error):
            raise EstimateError(
                ": ".join(filter(None, (called(stages, layer), module_that_raised(error), why)))
            ) from error
        reason = error_line(error)
        raise PipelineError(f"{called(stages, layer)} failed while profiling: {reason}") from error


def _with_a_copy(stages: Stages, layer: int, *, on_meta: bool) -> Stages:
    """The stages with a copy of the module of `layer` alone, so that only one copy exists at a time."""
    module = _on_meta(stages[layer]) if on_meta else deep_copy(stages[layer])
    for parameter in module.parameters():
        parameter.grad = None
    modules = (*stages.modules[:layer], module, *stages.modules[layer + 1 :])
    return stages.with_modules(modules)


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy on the meta device; weights that `module` has under several names are one each, unlike by `Module.to`."""
    moved: dict[int, torch.Tensor] = {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    for weight in module.parameters():
        moved[id(weight)] = nn.Parameter(weight.detach().to("meta"), weight.requires_grad)
    return deep_copy(module, moved)


def _measured(
    workload: Workload, layer: int, received: list[Any], optimizer: MakeOptimizer | None, measure: Measure
) -> tuple[Layer, Any, list[Any]]:
    """The layer, its output, and the output's values by outgoing edge."""
    module = workload.stages[layer]
    whole = StageRun(workload, layer, received)
    halves = StageRun(workload, layer, received, split=True)
    device = whole.device
    laps = measure(whole.run, device)
    f_us, _, b_us, _ = laps.us
    _, _, i_us, w_us = measure(halves.run, device).us
    changed = _changed_buffers(whole, module)
    again_us = measure(lambda mark: whole.run_again(mark, changed), device).us[0] if changed else f_us
    f_peak, _, b_peak, _ = peaks(whole.run, device)
    _, _, i_peak, w_peak = peaks(halves.run, device)
    # If no input needs a gradient, I has no work: its measured time is the runtime's own, once per stage.
    split_us = [i_us, w_us] if whole.wants_input_gradients else [0.0, b_us]
    measured = Layer(
        [f_us, b_us, *split_us, again_us],
        laps.spread,
        launch_text("FRBW", laps),
        [f_peak, b_peak, i_peak, w_peak],
        kept_storages_of(halves),
        num_bytes(changed.values()),
        optimizer_costs(module, optimizer, lambda run: measure(run, device)),
        whole.sizes,
        [[(place_of(t), num_bytes([t])) for t in tensors_of(value) if t.requires_grad] for value in received],
        [[place_of(tensor) for tensor in tensors_of(value) if tensor.requires_grad] for value in halves.values],
    )
    return measured, halves.output, halves.values  # the values whose storages have names


def _changed_buffers(stage_run: StageRun, module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, from before a forward, of the buffers that it changes; on the meta device, of running statistics."""
    buffers = dict(module.named_buffers())
    if any(buffer.is_meta for buffer in buffers.values()):
        norms = [norm for norm in module.modules() if getattr(norm, "track_running_stats", False) and norm.training]
        running = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
        return {name: buffer.clone() for name, buffer in buffers.items() if id(buffer) in running}
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    stage_run.run(lambda: None)
    return {name: old for name, old in before.items() if not torch.equal(old, buffers[name])}
