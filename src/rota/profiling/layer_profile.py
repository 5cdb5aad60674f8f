"""profile_layers and profile_model: a model's layers, measured or estimated, at one or several micro-batch sizes."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from rota.core.errors import EstimateError, PipelineError
from rota.core.layers import ESTIMATED, LayerCosts
from rota.core.profiles import Profile
from rota.core.units import count_text, time_text
from rota.models import Stages, finest, is_sequential
from rota.profiling.devices import device_named
from rota.profiling.known_numbers import KnownNumbers, module_that_raised, why_not_estimated
from rota.profiling.layer_costs import costs_of
from rota.profiling.layer_measurement import HowTo, Layer, called, measure_layers
from rota.profiling.optimizers import MakeOptimizer
from rota.profiling.other_programs import OtherPrograms
from rota.profiling.places import accelerators_of, place_name
from rota.profiling.profile_cache import ProfileCache, identity_of, inputs_of
from rota.profiling.stage_run import Given, tensors_of
from rota.runtime.losses import LossFn

Report = Callable[[str], None]
_ESTIMATES = "2, with all products of matrices"  # changes where the same model would get other estimates


def profile_layers(
    model: nn.Module | Stages,
    batch: Any,
    target: Any = None,
    loss_fn: LossFn | None = None,
    *,
    optimizer: MakeOptimizer | None = None,
    repeats: int = 7,
    device: str | None = None,
    report: Report = lambda _: None,
    cache: str | Path | None = None,
    refresh: bool = False,
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
        optimizer: Makes an optimizer of a list of parameters; None: no optimizer.
        repeats: Number of measurements; their median counts.
        device: A name in `rota.profiling.DEVICES`: estimate the times from what each operation computes and moves
            there. Nothing is computed then, and the model may be on the meta device. None: measure on its own device.
        report: Called with a line of text for each layer.
        cache: A file, or a folder with one file per model, so that nothing is measured twice.
        refresh: Whether to measure again what the cache has.

    Returns:
        The layers' times in µs, bytes and edges.

    Raises:
        PipelineError: If a layer fails, with its contents, or if the cache is of another model, device or version.
        EstimateError: If a layer needs data, so that it cannot be estimated.

    Warns:
        UserWarning: The floating-point operations of an operator are unknown, so that only its bytes are counted.
    """
    rows = num_rows(batch)
    profile = profile_model(
        model,
        {rows: (batch, target)}.__getitem__,
        [rows],
        loss_fn,
        optimizer=optimizer,
        repeats=repeats,
        device=device,
        report=report,
        cache=cache,
        refresh=refresh,
    )
    layers = profile[rows]
    if layers.why_incomplete:
        warnings.warn(layers.why_incomplete, stacklevel=2)
    return layers


def profile_model(
    model: nn.Module | Stages,
    make_batch: Callable[[int], tuple[Any, Any]],
    rows: Iterable[int],
    loss_fn: LossFn | None = None,
    *,
    optimizer: MakeOptimizer | None = None,
    repeats: int = 7,
    device: str | None = None,
    report: Report = lambda _: None,
    cache: str | Path | None = None,
    refresh: bool = False,
    cuts: Iterable[str] | None = None,
    within_s: float = math.inf,
) -> Profile:
    """Measure or estimate the costs of each layer for micro-batches of several sizes.

    Args:
        model: As in `profile_layers`.
        make_batch: Makes inputs and targets of one micro-batch, given its number of rows.
        rows: The numbers of rows; where `within_s` is given, the most important first.
        loss_fn: As in `profile_layers`.
        optimizer: As in `profile_layers`.
        repeats: As in `profile_layers`.
        device: As in `profile_layers`.
        report: As in `profile_layers`.
        cache: As in `profile_layers`.
        refresh: As in `profile_layers`.
        cuts: Where the model may be cut: its CutPoints, children or stages, by name or pattern, or modules of a model
            that is unmodified, as `rota.split` takes them; None: at any of them, before any block.
        within_s: About how many seconds to measure for. The smallest size is measured first, and the others as long as
            they fit, by the time that it took for each row; the first one that does not ends them.

    Returns:
        The layers' costs, by number of rows.

    Raises:
        PipelineError: As in `profile_layers`, and for a batch with another number of rows.
    """
    began_s = time.monotonic()
    sizes = list(dict.fromkeys(rows))
    how = HowTo(repeats, None if device is None else device_named(device), optimizer)
    stages, names = _layers(model, sorted(sizes), make_batch, cuts)
    _refuse(stages, device)
    where = how.device.name if how.device is not None else place_name(stages)
    identity = identity_of(stages, loss_fn, optimizer) | {"device": where}
    if how.device is not None:
        identity["estimates"] = _ESTIMATES
    name = f"{len(model)}-stages" if isinstance(model, Stages) else type(model).__name__
    cached = ProfileCache.of(cache, f"{name}-{where}", identity, refresh)
    missing = [count for count in sizes if not cached.knows(count)]
    if missing:  # the smallest first: it is measured in any case
        missing = sorted(missing) if within_s == math.inf else [min(missing), *(n for n in missing if n > min(missing))]
    took_s: dict[int, float] = {}  # of the sizes that were measured now
    for count in [*filter(cached.knows, sorted(sizes)), *missing]:
        expected_s = max((took * count / rows for rows, took in took_s.items()), default=0.0)
        if took_s and time.monotonic() - began_s + expected_s > within_s:
            break
        batch, target = make_batch(count)
        if (given := num_rows(batch)) != count:
            raise PipelineError(f"the batch for {count} rows has {given}; return {count}")
        inputs = {f"inputs of {count_text(count, 'row')}": inputs_of(batch, target)}
        if cached.has(count, inputs):
            report(f"{count_text(count, 'row')}: from {cached.path}")
            continue
        size_began_s = time.monotonic()
        cached.add(_measured(Given(stages, batch, target, loss_fn), how, names, count, where, report), inputs)
        took_s[count] = time.monotonic() - size_began_s
    return cached.profile


def _measured(given: Given, how: HowTo, names: tuple[str, ...], count: int, where: str, report: Report) -> LayerCosts:
    """The layers measured one after another, with the cores that other programs took from them on a CPU."""
    stages, others = given.stages, OtherPrograms()
    layers: list[Layer] = []
    for measured in measure_layers(given, how):
        times = " ".join(f"{k} {time_text(round(us))}" for k, us in zip("FB", measured.times_us, strict=False))
        launches = f"; {measured.launches}" if measured.launches else ""
        report(f"{called(stages, len(layers))}: {times}{launches}")
        layers.append(measured)
    if how.device is not None:
        return costs_of(stages, layers, names, count, f"{ESTIMATED} for {where}")
    missing_cores = 0.0 if accelerators_of(stages) else round(others.missing_cores(1), 3)
    costs = costs_of(stages, layers, names, count, f"measured on {where}, one layer after another")
    return replace(costs, missing_cores=missing_cores)


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
    if not any(parameter.is_meta for parameter in model.parameters()):
        return finest(model, example, cuts)
    known = KnownNumbers()
    try:
        with known:
            return finest(model, known.on_meta(example), cuts)
    except Exception as error:
        if why := why_not_estimated(error, known.operation_that_raised(error)):
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
