"""Models larger than a machine's memory: made without weights, of which a process then makes those of its own stages.

with deferred_init():  ──▶ model on meta, and a log ──split──▶ stages ──materialize(local)──▶ these with memory
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from rota.errors import PipelineError
from rota.models import Stages
from rota.models.aliases import tensors_of
from rota.models.carving.absent import Absent
from rota.models.replacing import replace
from rota.runtime.deferred.construction import deferring
from rota.runtime.deferred.log import Log, Region, deferred

__all__ = ["deferred_init", "materialize"]


@contextmanager
def deferred_init(*, to_load: bool = False) -> Iterator[None]:
    """A model made in this context gets no memory for its weights: they are on the meta device.

    Random numbers are drawn as they would be without it, so `materialize` makes the same weights to the last bit. It
    takes as long as making the model, and memory for one weight at a time.

    Args:
        to_load: The weights will be loaded, so nothing is drawn for them. Buffers can still be made.
    """
    with deferring(draws=not to_load):
        yield


def materialize(stages: Stages, local: Iterable[int], device: torch.device | str | None = None) -> None:
    """Give memory to the `local` stages, and free that of all others. Do it before they are wrapped or trained.

    Tensors made in `deferred_init` get the values that they would have had without it. Tensors stay the same objects.

    Args:
        stages: The stages of a whole model.
        local: The stages that this process runs, from `local_stages`.
        device: Where to put them, such as `local_device()`. Values are made where they would be without it, and moved
            one after another. None: they stay there.

    Raises:
        PipelineError: A weight of these stages is on the meta device, and was not made in `deferred_init`.
    """
    give_memory(stages, local, device=device)


def give_memory(
    stages: Stages,
    local: Iterable[int],
    loaded: Iterable[torch.Tensor] = (),
    device: torch.device | str | None = None,
) -> None:
    """`materialize`, but tensors in `loaded`, whose values come from elsewhere, get memory without values."""
    target = None if device is None else torch.device(device)
    local = _checked(stages, local)
    named = _held(stages, local)
    loaded, holders = {*loaded}, [inner for module in stages.modules for inner in module.modules()]
    _refuse_unknown(named, loaded)
    _refuse_undrawn({name: tensor for name, tensor in named.items() if tensor not in loaded})
    for tensor in loaded & {*named.values()}:
        if tensor.is_meta:
            replace(
                tensor,
                torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=target or _home(tensor)),
                holders,
            )
    by_log: dict[int, tuple[Log, list[torch.Tensor]]] = {}
    for tensor in named.values():
        if (mark := deferred(tensor)) is not None:
            by_log.setdefault(id(mark.log), (mark.log, []))[1].append(tensor)
    for log, tensors in by_log.values():
        on: dict[int, list[tuple[torch.Tensor, Region]]] = {}
        for tensor in tensors:
            if (mark := deferred(tensor)) is not None:
                on.setdefault(mark.number, []).append((tensor, Region.of(tensor, mark.number)))
        for number, storage in log.replayed(on):
            for tensor, region in on[number]:
                made = region.on(storage)
                replace(tensor, made if target is None else made.to(target), holders)
            del storage, made
    if target is not None:
        stages.to(target, local)
    for stage in local:
        devices = {tensor.device for tensor in stages[stage].parameters()}
        if len(devices) == 1:  # Absents of other stages' weights follow
            stages[stage].to(devices.pop())
    kept = {*_held(stages, local).values()}
    for tensor in _held(stages, range(len(stages))).values():
        if tensor not in kept and not tensor.is_meta:
            replace(tensor, torch.empty_like(tensor, device="meta"), holders)


def _checked(stages: Stages, local: Iterable[int]) -> list[int]:
    chosen = sorted({*local})
    if wrong := [stage for stage in chosen if not 0 <= stage < len(stages)]:
        raise PipelineError(f"local has stage {wrong[0]}, but the stages are 0 to {len(stages) - 1}")
    return chosen


def _held(stages: Stages, which: Iterable[int]) -> dict[str, torch.Tensor]:
    """All tensors of these stages by name: weights, buffers, and plain attributes of modules."""
    return {
        f"{name} of stage {stage}": tensor
        for stage in which
        for name, tensor, _ in tensors_of(stages[stage])
        if not isinstance(tensor, Absent)
    }


def _refuse_unknown(named: dict[str, torch.Tensor], loaded: set[torch.Tensor]) -> None:
    """Raise PipelineError if only the shape of a tensor is known."""
    unknown = [
        name for name, tensor in named.items() if tensor.is_meta and deferred(tensor) is None and tensor not in loaded
    ]
    if unknown:
        raise PipelineError(
            f"{_few(unknown)}: on the meta device, and its values are not known. Make the whole model in "
            "`with rota.deferred_init():`, including its dtype and all changes to its weights"
        )


def _refuse_undrawn(named: dict[str, torch.Tensor]) -> None:
    """Raise PipelineError if a tensor needs random numbers that `to_load` left undrawn."""
    undrawn = [
        name
        for name, tensor in named.items()
        if (mark := deferred(tensor)) is not None
        and not mark.log.draws
        and any(mark.log.is_undrawn(index) for index in mark.log.needed_for({mark.number})[0])
    ]
    if undrawn:
        raise PipelineError(
            f"{_few(undrawn)}: its random numbers were not drawn, as the model was made in "
            "deferred_init(to_load=True): load it, or leave to_load out"
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _home(tensor: torch.Tensor) -> torch.device:
    """The device on which a tensor without memory will be."""
    mark = deferred(tensor)
    return torch.device("cpu") if mark is None else mark.device
