"""Whether a model runs in torchtitan's parts: each part runs the whole forward, with the modules of others gone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rota.core.errors import PipelineError, SplitError
from rota.interop.modules import CONTAINERS, require_parts
from rota.runtime.messages import tensors_in

_REMEDY = "put what every stage would repeat, such as adding positions, into a module of one stage"


def check_parts(model: nn.Module, parts: Sequence[Sequence[str]], inputs: Any) -> None:
    """Run the parts one after another, as torchtitan would, and compare with the model's own forward.

    Modules of other parts are None, or removed from their nn.ModuleDict or nn.ModuleList. The model is run in
    evaluation mode. On the meta device only shapes and dtypes are compared.

    Args:
        model: The whole model.
        parts: For each stage the names of its modules, as from `module_parts`.
        inputs: One small batch, as the model takes it, on the model's device. Of a dict, all but the first value go to
            every part.

    Raises:
        SplitError: A part calls a module that it does not have, or the parts compute something else than the model.
        PipelineError: The whole model does not run on this batch, so nothing could be checked.
    """
    require_parts(model, parts)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            whole = _run(model, inputs)
            _compare(_run_all(model, parts, inputs), whole)
    finally:
        for module in training:
            module.training = True


def _run(model: nn.Module, inputs: Any) -> Any:
    try:
        return _call(model, inputs)
    except Exception as error:
        raise PipelineError(f"the whole model does not run on this batch: {_text_of(error)}") from error


def _run_all(model: nn.Module, parts: Sequence[Sequence[str]], inputs: Any) -> Any:
    """What the last part returns."""
    taken = output = inputs
    for number, names in enumerate(parts):
        part, gone, read = _pruned(model, names)
        try:
            output = _call(part, taken)
        except Exception as error:
            raise SplitError(f"stage {number} {_why(error, gone, read)}") from error
        taken = output
        if isinstance(inputs, Mapping):
            first, *others = inputs
            taken = {first: output, **{name: inputs[name] for name in others}}
    return output


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _pruned(model: nn.Module, names: Sequence[str]) -> tuple[nn.Module, set[str], list[str]]:
    """A part that shares the model's weights, what it lacks, and a list that gets the names of what it looks up."""
    part = copy.copy(model)
    gone: set[str] = set()
    children: dict[str, nn.Module | None] = {}
    for name, child in model.named_children():
        if isinstance(child, CONTAINERS):
            kept = {key: entry for key, entry in child.named_children() if f"{name}.{key}" in names}
            gone |= {f"{name}.{key}" for key, _ in child.named_children() if key not in kept}
            children[name] = nn.ModuleDict(kept) if isinstance(child, nn.ModuleDict) else nn.ModuleList(kept.values())
        else:
            children[name] = child if name in names else None
            gone |= {name} - {*names}
    vars(part)["_modules"] = children
    read: list[str] = []
    part.__class__ = _recording_reads(type(model), read)
    return part, gone, read


def _recording_reads(kind: type[nn.Module], read: list[str]) -> type[nn.Module]:
    """A class of modules that behaves as `kind`, and writes the names of the attributes that are looked up."""

    def __getattr__(self: nn.Module, name: str) -> Any:
        read.append(name)
        return kind.__getattr__(self, name)

    return type(kind.__name__, (kind,), {"__getattr__": __getattr__})


def _why(error: Exception, gone: set[str], read: Sequence[str]) -> str:
    """What went wrong in a stage, with the missing module that it called, if that is what happened."""
    if isinstance(error, (TypeError, AttributeError)) and "'NoneType' object" in str(error):
        called = next((name for name in reversed(read) if name in gone), None)
        if called is not None:
            return (
                f"calls {called!r}, which torchtitan replaces with None there: the forward must skip it, as in "
                f"x = self.{called}(x) if self.{called} is not None else x"
            )
    if isinstance(error, (KeyError, IndexError)):
        container = next((name for name in reversed(read) if any(each.startswith(f"{name}.") for each in gone)), None)
        if container is not None:
            return (
                f"looks up an entry of {container!r} that torchtitan removes there ({_text_of(error)}): the forward "
                f"must run the entries that are left, as in for layer in self.{container}.values() of an nn.ModuleDict"
            )
    return f"fails without the modules of the other stages, though the whole model runs: {_text_of(error)}"


def _compare(by_parts: Any, whole: Any) -> None:
    split, unsplit = [*tensors_in(by_parts)], [*tensors_in(whole)]
    shapes = [[(tuple(one.shape), one.dtype) for one in each] for each in (split, unsplit)]
    if shapes[0] != shapes[1]:
        raise SplitError(
            f"the stages, run one after another without each other's modules, return {_shown(shapes[0])}, but the "
            f"whole model {_shown(shapes[1])}: {_REMEDY}"
        )
    for one, other in zip(split, unsplit, strict=True):
        if one.is_meta:
            continue
        try:
            torch.testing.assert_close(one, other, equal_nan=True)
        except AssertionError as error:
            raise SplitError(
                f"the stages, run one after another without each other's modules, do not compute what the whole model "
                f"computes: {_REMEDY} ({_text_of(error)})"
            ) from None


def _shown(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}".removeprefix("torch.") for shape, dtype in shapes) or "no tensor"


def _text_of(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
