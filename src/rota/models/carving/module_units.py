"""Units: the modules whose calls a stage runs or answers, and how their calls are intercepted.

model ─┬─ embed         unit: has parameters
       ├─ layers ─┬─ 0  unit: a block, where a stage may begin
       │          └─ 1  unit
       ├─ cuts[0]       unit: a CutPoint, where a stage may end; modules that hold one are no units
       ├─ rotary        not a unit: its code runs wherever it is needed, as the forwards of model and layers do
       └─ head          unit
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from rota.models.cutpoint import find_cut_points

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: They may have buffers with running statistics, and some have no parameters.
NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


class Interceptor(Protocol):
    """Gets the calls of a module."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the call's result."""


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
        if is_unit and (path in blocks or cut_points or _has_state(module)):
            yield path
        elif not is_unit or any(isinstance(one, (*DROPOUTS, *NORMS)) for one in module.modules()):
            for name, child in module.named_children():
                yield from visit(inside + name, child)

    found: dict[nn.Module, str] = {}
    for path in visit("", model):
        found.setdefault(model.get_submodule(path), path)
    return [*(found | cut_points).values()]


def _has_state(module: nn.Module) -> bool:
    return is_dropout(module) or isinstance(module, NORMS) or any(True for _ in module.parameters())


def units_at(model: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """The units at these paths; those of CutPoints may lead through lists and dicts: `cuts[0]`."""
    cut_points: dict[str, nn.Module] = {path: cut_point for cut_point, path in find_cut_points(model).items()}
    return [cut_points[path] if path in cut_points else model.get_submodule(path) for path in paths]


def is_dropout(module: nn.Module) -> bool:
    """Whether it is one of PyTorch's dropouts, which return their input in evaluation mode."""
    return isinstance(module, DROPOUTS)


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


_made: dict[type[nn.Module], type[nn.Module]] = {}


def _intercepted(base: type[nn.Module]) -> type[nn.Module]:
    if base in _made:
        return _made[base]

    class Intercepted(base):  # type: ignore[misc, valid-type]
        _rota_base = base

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            interceptor = vars(self).get("_rota_interceptor")
            return base.__call__(self, *args, **kwargs) if interceptor is None else interceptor(self, args, kwargs)

        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            activity = vars(self).get("_rota_activity")
            if activity is None or not activity.active:
                return base.named_parameters(self, *args, **kwargs)
            return _whole("_parameters", self, *args, **kwargs)

        def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            activity = vars(self).get("_rota_activity")
            if activity is None or not activity.active:
                return base.named_buffers(self, *args, **kwargs)
            return _whole("_buffers", self, *args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:  # a class made here cannot be imported
            del protocol
            return _new, (base,), self.__getstate__()

    Intercepted.__name__, Intercepted.__qualname__ = base.__name__, base.__qualname__
    Intercepted.__module__ = base.__module__
    _made[base] = Intercepted
    return Intercepted


def _new(base: type[nn.Module]) -> nn.Module:
    made = _intercepted(base)
    return made.__new__(made)
