"""Models larger than a machine's memory: made without weights, of which a process then makes those of its own stages.

with meta_init():  ──▶ model, weights on meta ──split──▶ stages ──materialize(local)──▶ these with values
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from rota.core.errors import PipelineError
from rota.models import Stages
from rota.models.aliases import tensors_of
from rota.models.carving.absent import Absent
from rota.models.carving.operations import storage_of
from rota.models.carving.stage import CarvedStage
from rota.models.randomness import random_state_kept
from rota.models.replacing import replace
from rota.torch_internals import StorageReference, address_of

Init = Callable[[nn.Module], object]
_REMEDY = (
    "let materialize(…, init=fn) fill it in place, where fn(module) is called for each module, or make the model in "
    "`with rota.meta_init():`, where buffers keep the values that the constructor gives them"
)


@contextmanager
def meta_init() -> Iterator[None]:
    """Modules made in this context have their parameters on the meta device, without memory, and buffers as ever.

    What their constructors fill parameters with is lost: `materialize` initializes, or `load_pretrained` loads them.
    """
    memory: dict[int, tuple[StorageReference, Tensor]] = {}  # parameters that share memory still do on meta

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        del module, name
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return
        storage = parameter.untyped_storage()
        reference, whole = memory.get(address_of(storage), (None, None))
        if reference is None or whole is None or reference.is_expired:
            whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            memory[address_of(storage)] = StorageReference(storage), whole
        del storage
        where = parameter.size(), parameter.stride(), parameter.storage_offset()
        replace(parameter, whole.view(parameter.dtype).as_strided(*where))

    hook = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        hook.remove()


def materialize(
    stages: Stages, local: Iterable[int], device: torch.device | str | None = None, init: Init | None = None
) -> None:
    """Give memory to the `local` stages, initialize them, and free all others. Do it before anything refers to them.

    Only tensors on the meta device are initialized, in place: they stay the same objects. Each module draws from a
    generator that is seeded by its name in the model and `torch.initial_seed()`, on the CPU. So its weights are the
    same however the model is cut and placed, as long as `init` fills only what the module itself holds. Random states
    are afterwards as they were.

    Args:
        stages: The stages of a whole model.
        local: The stages that this process runs, from `local_stages`.
        device: Where to put them, such as `local_device()`, one stage after another. None: they stay where they are.
        init: Called as by `nn.Module.apply`, with each module that has such tensors in it, children first. None: the
            model's own `_init_weights`, as models of transformers have it, or else each module's `reset_parameters`.

    Raises:
        PipelineError: Nobody has filled a tensor that was on the meta device.
    """
    give_memory(stages, local, device=device, init=init)


def give_memory(
    stages: Stages,
    local: Iterable[int],
    loaded: Iterable[Tensor] = (),
    device: torch.device | str | None = None,
    init: Init | None = None,
) -> None:
    """`materialize`, but tensors in `loaded`, whose values come from elsewhere, are left without values."""
    target, loaded, local = None if device is None else torch.device(device), {*loaded}, sorted({*local})
    if wrong := [stage for stage in local if not 0 <= stage < len(stages)]:
        raise PipelineError(f"local has stage {wrong[0]}, but the stages are 0 to {len(stages) - 1}")
    holders = [inner for module in stages.modules for inner in module.modules()]
    named = _held(stages, local)
    _refuse_shared(named)
    for tensor in loaded.intersection(named.values()):
        _make_room(tensor, holders, target)
    for stage in local:
        empty = {tensor: name for name, tensor in _held(stages, [stage]).items() if tensor.is_meta}
        if empty:
            for tensor in empty:
                _make_room(tensor, holders, torch.device("cpu"))
            _initialize(stages, stage, empty, init or _default_init(stages))
        if target is not None:
            stages.to(target, [stage])
        devices = {tensor.device for tensor in stages[stage].parameters()}
        if len(devices) == 1:  # Absents of other stages' weights follow
            stages[stage].to(devices.pop())
    kept = {*_held(stages, local).values()}
    for tensor in _held(stages, range(len(stages))).values():
        if tensor not in kept and not tensor.is_meta:
            replace(tensor, torch.empty_like(tensor, device="meta"), holders)


def _held(stages: Stages, numbers: Iterable[int]) -> dict[str, Tensor]:
    """All tensors of these stages by name: weights, buffers, and plain attributes of modules."""
    return {
        f"{name} of stage {stage}": tensor
        for stage in numbers
        for name, tensor, _ in tensors_of(stages[stage])
        if not isinstance(tensor, Absent)
    }


def _make_room(tensor: Tensor, holders: list[nn.Module], device: torch.device | None) -> None:
    if tensor.is_meta:
        room = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        replace(tensor, room, holders)


def _refuse_shared(named: dict[str, Tensor]) -> None:
    """Raise PipelineError if two tensors on the meta device share memory, which each would get for itself."""
    by_storage: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named.items():
        if tensor.is_meta:
            other_name, other = by_storage.setdefault(storage_of(tensor), (name, tensor))
            if other is not tensor:
                raise PipelineError(
                    f"{name} and {other_name} share memory on the meta device, which materialize cannot give them: tie "
                    "them as one parameter, or give each its own by clone()"
                )


# --- initial values ---------------------------------------------------------------------------------------------------


def _default_init(stages: Stages) -> Init:
    """The model's own `_init_weights`, or `reset_parameters` of each module."""
    model: Any = stages[0] if stages.unsplit is None and len(stages) == 1 else stages.unsplit
    return model._init_weights if hasattr(type(model), "_init_weights") else _reset


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


@torch.no_grad()
def _initialize(stages: Stages, stage: int, empty: dict[Tensor, str], init: Init) -> None:
    """Call `init` with the modules of a stage that have tensors of `empty` in them. Raises PipelineError."""
    root, first_seed = stages[stage], torch.initial_seed()
    before = dict(root.named_parameters())
    for tensor in empty:
        _fill_with_mark(tensor)
    with random_state_kept(root):
        for path, module, own in _modules_with(
            root.root if isinstance(root, CarvedStage) else root, {*empty}, init is _reset
        ):
            torch.manual_seed(_seed(first_seed, stages, stage, path))
            others = [(tensor, tensor.clone()) for tensor in _direct(module) if tensor not in own]
            init(module)
            for tensor, value in others:
                tensor.copy_(value)
    for name, parameter in root.named_parameters():
        if parameter is not before[name]:
            raise PipelineError(
                f"init makes another parameter of {name} of stage {stage}: let it fill the one that is there, in "
                "place, as nn.init.normal_ does, because others refer to it"
            )
    unfilled = [
        name
        for name, tensor in _held(stages, [stage]).items()
        if tensor.is_meta or (tensor in empty and _has_mark(tensor))
    ]
    if unfilled:
        more = f" and {len(unfilled) - 3} more" if len(unfilled) > 3 else ""
        raise PipelineError(f"{', '.join(unfilled[:3])}{more}: nobody has given it values. {_REMEDY}")


def _fill_with_mark(tensor: Tensor) -> None:
    """Fill it with what no initialization makes: nan, the extreme of whole numbers, a byte that is no bool."""
    if tensor.dtype is torch.bool:
        tensor.view(torch.uint8).fill_(2)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _has_mark(tensor: Tensor) -> bool:
    if tensor.dtype is torch.bool:
        marked = tensor.view(torch.uint8) == 2
    elif tensor.is_floating_point() or tensor.is_complex():
        marked = (tensor if tensor.dtype.itemsize > 1 else tensor.float()).isnan()
    else:
        marked = tensor == torch.iinfo(tensor.dtype).max
    return bool(marked.any())


def _modules_with(root: nn.Module, empty: set[Tensor], directly: bool) -> list[tuple[str, nn.Module, set[Tensor]]]:
    """The modules, children first, that have such a tensor in them, or hold one themselves; with those that they own.

    Of the modules that hold one tensor, the first owns it.
    """
    modules = [*root.named_modules()]
    owned_by, owned = dict[str, set[Tensor]](), set[Tensor]()
    for path, module in modules:
        own = {tensor for tensor in _direct(module) if tensor in empty and tensor not in owned}
        if own:
            owned |= own
            owned_by[path] = own
            steps = path.split(".")
            for length in () if directly else range(len(steps)):
                owned_by.setdefault(".".join(steps[:length]), set())
    return [(path, module, owned_by[path]) for path, module in reversed(modules) if path in owned_by]


def _direct(module: nn.Module) -> list[Tensor]:
    """The tensors that a module itself holds."""
    held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
    return [value for value in held if isinstance(value, Tensor) and not isinstance(value, Absent)]


def _seed(first_seed: int, stages: Stages, stage: int, path: str) -> int:
    """The seed of a module: of the script's seed, and its name in the model, or its stage's number if it has none."""
    name = stages.name_in_model(stage, path)
    if stages.cuts is None and len(stages) > 1 and name == path:
        name = f"{stage}.{path}".rstrip(".")
    digest = hashlib.sha256(f"{first_seed} {name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
