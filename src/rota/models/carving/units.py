"""Units: the modules whose calls a stage runs or answers, how calls are intercepted, and what goes in and out of them.

model ─┬─ embed         unit: has parameters
       ├─ layers ─┬─ 0  unit: a block, where a stage may begin
       │          └─ 1  unit
       ├─ cuts[0]       unit: a CutPoint, where a stage may end; modules that hold one are no units
       ├─ rotary        not a unit: its code runs wherever it is needed, as the forwards of model and layers do
       └─ head          unit
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from rota.models.cutpoint import find_cut_points

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: They may have buffers with running statistics, and some have no parameters.
NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_WITH_STATE = (*DROPOUTS, *NORMS)  # of random numbers, or running statistics

#: Gets a module and the arguments of its call, and returns the call's result.
Interceptor: TypeAlias = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def find_units(model: nn.Module, blocks: Collection[str], opened: Collection[str] = ()) -> list[str]:
    """The paths of all units: blocks, and modules without blocks that have state or dropout.

    In a model with CutPoints: these, and all modules that hold none of them. `opened` ones are no units, but modules in
    them may be.
    """
    cut_points = find_cut_points(model)

    def is_opened(path: str, inside: str, module: nn.Module) -> bool:
        if path in opened or any(block.startswith(inside) for block in blocks):
            return True
        if type(module).forward is nn.Module.forward:
            return True  # lists and dicts of modules have no forward
        return bool(cut_points and find_cut_points(module))

    def visit(path: str, module: nn.Module) -> Iterator[str]:
        inside = path + "." if path else ""
        is_unit = path in blocks or not is_opened(path, inside, module)
        has_state = isinstance(module, _WITH_STATE) or any(True for _ in module.parameters())
        if is_unit and (path in blocks or cut_points or has_state):
            yield path
        elif not is_unit or any(isinstance(inner, _WITH_STATE) for inner in module.modules()):
            for name, child in module.named_children():
                yield from visit(inside + name, child)

    units: dict[nn.Module, str] = {}
    for path in visit("", model):
        units.setdefault(model.get_submodule(path), path)
    return [*(units | cut_points).values()]


def units_at(model: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """The units at these paths; those of CutPoints may lead through lists and dicts: `cuts[0]`."""
    cut_points: dict[str, nn.Module] = {path: cut_point for cut_point, path in find_cut_points(model).items()}
    return [cut_points[path] if path in cut_points else model.get_submodule(path) for path in paths]


def intercept(module: nn.Module, interceptor: Interceptor) -> None:
    """From now on calls of `module` go to `interceptor`; it stays an instance of its class.

    The class's own `__call__` runs the module itself: with hooks, and compiled if it is.
    """
    module.__class__ = _intercepted(type(module))
    vars(module)["_rota_interceptor"] = interceptor


class Activity(Protocol):
    """Whether a stage's forward runs."""

    active: bool


def show_whole(module: nn.Module, activity: Activity) -> None:
    """While a stage runs, `parameters()` and `buffers()` of `module` have those of other stages too, in their order.

    Forwards ask a module for the dtype or device of its first weight. Otherwise, optimizers and wrappers ask, and get
    those of the stage. Relies on the lists of names that `note_names` has left in `module` and the modules in it.
    """
    if not hasattr(type(module), "_rota_base"):
        module.__class__ = _intercepted(type(module))
    vars(module)["_rota_activity"] = activity


def note_names(module: nn.Module) -> None:
    """Note the order of a module's own parameters and buffers, some of which will be plain attributes."""
    vars(module)["_rota_names"] = {"_parameters": [*module._parameters], "_buffers": [*module._buffers]}


def _whole(
    held: str, module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, Tensor]]:
    seen = set()
    inside = module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate) if recurse else [(prefix, module)]
    for path, inner in inside:
        own = getattr(inner, held)
        for name in vars(inner).get("_rota_names", {}).get(held, own):
            tensor = own.get(name, vars(inner).get(name))
            if tensor is None or (remove_duplicate and id(tensor) in seen):
                continue
            seen.add(id(tensor))
            yield f"{path}.{name}" if path else name, tensor


_intercepted_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _intercepted(base: type[nn.Module]) -> type[nn.Module]:
    if base in _intercepted_classes:
        return _intercepted_classes[base]

    class Intercepted(base):  # type: ignore[misc, valid-type]
        _rota_base = base

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            interceptor = vars(self).get("_rota_interceptor")
            return base.__call__(self, *args, **kwargs) if interceptor is None else interceptor(self, args, kwargs)

        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            of_stage = None if _shows_whole(self) else base.named_parameters(self, *args, **kwargs)
            return of_stage or _whole("_parameters", self, *args, **kwargs)

        def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            of_stage = None if _shows_whole(self) else base.named_buffers(self, *args, **kwargs)
            return of_stage or _whole("_buffers", self, *args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:  # a class made here cannot be imported
            del protocol
            return _new, (base,), self.__getstate__()

    Intercepted.__name__, Intercepted.__qualname__ = base.__name__, base.__qualname__
    Intercepted.__module__ = base.__module__
    _intercepted_classes[base] = Intercepted
    return Intercepted


def _shows_whole(module: nn.Module) -> bool:
    activity = vars(module).get("_rota_activity")
    return activity is not None and activity.active


def _new(base: type[nn.Module]) -> nn.Module:
    intercepted = _intercepted(base)
    return intercepted.__new__(intercepted)


# --- arguments and results --------------------------------------------------------------------------------------------

Structure: TypeAlias = Any  # None for a leaf, else (how, type, keys, structures of the items)

PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})


def flatten(value: Any) -> tuple[Structure, list[Any]]:
    """The structure of `value`, and its leaves. Whatever is not a known container is a leaf."""
    leaves: list[Any] = []
    return _structure(value, leaves), leaves


def _structure(value: Any, leaves: list[Any]) -> Structure:
    kind = type(value)
    if kind is Tensor or kind in PLAIN:
        leaves.append(value)
        return None
    if kind is tuple or kind is list:
        return "sequence", kind, None, tuple([_structure(item, leaves) for item in value])
    if isinstance(value, dict) and (dataclasses.is_dataclass(value) or kind in (dict, OrderedDict)):
        how = "fields" if dataclasses.is_dataclass(value) else "mapping"
        return how, kind, tuple(value), tuple([_structure(item, leaves) for item in value.values()])
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value) if field.init)
        return "fields", kind, names, tuple([_structure(getattr(value, name), leaves) for name in names])
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return "named", kind, None, tuple([_structure(item, leaves) for item in value])
    leaves.append(value)
    return None


def rebuild(structure: Structure, leaves: Iterator[Any]) -> Any:
    """The value of that structure with these leaves."""
    if structure is None:
        return next(leaves)
    how, kind, keys, inner = structure
    items = [rebuild(item, leaves) for item in inner]
    if how == "sequence":
        return kind(items)
    if how == "named":
        return kind._make(items)
    named = zip(keys, items, strict=True)
    return kind(**dict(named)) if how == "fields" else kind(named)


def paths(structure: Structure, prefix: str = "") -> Iterator[str]:
    """Where each leaf is: `""`, `[0]`, `.logits`."""
    if structure is None:
        yield prefix
        return
    how, _, keys, inner = structure
    for key, item in zip(keys or range(len(inner)), inner, strict=True):
        yield from paths(item, f"{prefix}.{key}" if how == "fields" else f"{prefix}[{key!r}]")
