"""The modules of each stage of a model, by the names by which torchtitan cuts a model.

A name is a child of the model, or an entry of a child that is an nn.ModuleDict or nn.ModuleList:

    tok_embeddings   layers.0   layers.1   norm   output
    └───── part 0 ──────────┘   └─────── part 1 ───────┘

Each part runs the whole model's forward, with the modules of other parts gone: children are None, entries removed.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from rota.core.errors import PipelineError, SplitError, error_line
from rota.models import Stages
from rota.models.carving.stage import CarvedStage
from rota.runtime.messages import tensors_in

Parts: TypeAlias = tuple[tuple[str, ...], ...]

CONTAINERS = (nn.ModuleDict, nn.ModuleList)
_REMEDY = "put what every stage would repeat, such as adding positions, into a module of one stage"
_NOT_THE_MODELS = (str(Path(torch.__file__).parent), __file__)  # files whose lines say nothing about the model


def module_parts(model: nn.Module, stages: Stages) -> Parts:
    """For each stage of `rota.split(model, …)` the names of its modules, in the model's order.

    A module without parameters is in the parts of all stages that call it, and in every part if none does. Raises
    SplitError if a cut is inside of a module, if stages are not a chain, or if a parameter belongs to no module or to
    several parts.
    """
    named = _named(model)
    chain = [(stage, stage + 1) for stage in range(len(stages) - 1)]
    if sorted(edge[:2] for edge in stages.edges) != chain:
        edges = ", ".join(map(str, stages.edges))
        raise SplitError(f"torchtitan runs a chain of stages, but these have the edges {edges}: cut where one value is")
    paths = [_paths(model, stages[stage]) for stage in range(len(stages))]
    parts: list[list[str]] = [[] for _ in paths]
    for name, module in named.items():
        homes = [s for s, held in enumerate(paths) if any(f"{path}.".startswith(f"{name}.") for path in held)]
        if not all(name in paths[stage] for stage in homes[1:] and homes):
            raise SplitError(
                f"stages {', '.join(map(str, homes))} share {name!r} ({type(module).__name__}): a cut is inside of "
                f"it, and torchtitan keeps or removes it whole; cut between two of {', '.join(named)}"
            )
        if not homes and next(module.parameters(), None) is not None:
            raise SplitError(f"no stage calls {name!r} ({type(module).__name__}), which has parameters: remove it")
        for stage in homes or range(len(parts)):
            parts[stage].append(name)
    return _without_ties(named, parts)


def parts_beginning_with(model: nn.Module, first_modules: Iterable[str]) -> Parts:
    """The model's modules in its order, with a new part beginning at each of `first_modules`.

    For models without CutPoints: nothing is run, so you must make sure that they run in this order. Raises
    SplitError.
    """
    named = _named(model)
    names, begins = [*named], [0]
    for name in first_modules:
        if name not in named:
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"give one of {', '.join(names)}"
            raise SplitError(f"{type(model).__name__} has no {name!r} that a part can begin with; {hint}")
        begins.append(names.index(name))
        if begins[-1] <= begins[-2]:
            raise SplitError(
                f"{name!r} cannot begin a part: it is not after {names[begins[-2]]!r}, which begins the previous part"
            )
    return _without_ties(named, [names[begin:end] for begin, end in pairwise([*begins, len(names)])])


def require_parts(model: nn.Module, parts: Sequence[Sequence[str]]) -> None:
    """Raise SplitError unless the parts name modules of the model, and each with parameters is in one.

    torchtitan says nothing about either: a module that no part names is missing on all ranks.
    """
    named = _named(model)
    present = {name for part in parts for name in part}
    if unknown := sorted(present - {*named}):
        raise SplitError(
            f"the plan's parts have {unknown[0]!r}, but {type(model).__name__} has {', '.join(named)}: export the plan "
            f"with a model whose modules have these names"
        )
    for name, module in named.items():
        if name not in present and next(module.parameters(), None) is not None:
            raise SplitError(
                f"{name!r} of {type(model).__name__} is in none of the plan's parts, so torchtitan would leave it out "
                f"on all ranks: plan and export with this model"
            )
    _without_ties(named, parts)


def _named(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that a part can have or lack, by name."""
    if isinstance(model, nn.Sequential):
        raise SplitError(
            "an nn.Sequential calls each of its children, and torchtitan leaves None in the place of those of other "
            "parts: hold the layers in an nn.ModuleDict of a model whose forward passes over what is not there"
        )
    for name, _ in model.named_parameters(recurse=False):
        raise SplitError(
            f"parameter {name!r} belongs to the {type(model).__name__} itself, so every part would train a copy of its "
            f"own: move it into a sub-module"
        )
    named: dict[str, nn.Module] = {}
    for child, module in model.named_children():
        if isinstance(module, CONTAINERS):
            named |= {f"{child}.{key}": entry for key, entry in module.named_children()}
        else:
            named[child] = module
    return named


def _paths(model: nn.Module, stage: nn.Module) -> set[str]:
    """The paths of what runs in a stage. Raises SplitError for a parameter that is not the model's own."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for path, parameter in stage.named_parameters(remove_duplicate=False):
        if parameters.get(path) is not parameter:
            raise SplitError(
                f"parameter {path!r} of a stage is not the model's of that name: make stages by rota.split"
            )
    if isinstance(stage, CarvedStage):
        return {path.partition("#")[0] for path in (*stage.holds, *stage.cut_points)}
    return {path for path, _ in stage.named_modules(remove_duplicate=False)}


def _without_ties(named: dict[str, nn.Module], parts: Sequence[Sequence[str]]) -> Parts:
    """Raise SplitError if two parts have the same parameter."""
    homes: dict[int, tuple[int, str]] = {}
    for part, names in enumerate(parts):
        for name in names:
            for path, parameter in named[name].named_parameters(remove_duplicate=False):
                other, other_name = homes.setdefault(id(parameter), (part, f"{name}.{path}"))
                if other != part:
                    raise SplitError(
                        f"parameter {name}.{path} of part {part} is tied to {other_name} of part {other}, and "
                        f"torchtitan sums no gradients over parts: untie them, or cut so that both are in one part"
                    )
    return tuple(map(tuple, parts))


# --- whether a model runs in its parts --------------------------------------------------------------------------------


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
            try:
                whole = _call(model, inputs)
            except Exception as error:
                raise PipelineError(f"the whole model does not run on this batch: {_text_of(error)}") from error
            _compare(_run_all(model, parts, inputs), whole)
    finally:
        for module in training:
            module.training = True


def _run_all(model: nn.Module, parts: Sequence[Sequence[str]], inputs: Any) -> Any:
    stage_inputs = output = inputs
    for stage, names in enumerate(parts):
        try:
            output = _call(_pruned(model, names), stage_inputs)
        except Exception as error:
            raise SplitError(
                f"stage {stage} fails without the modules of the other stages, though the whole model runs: "
                f"{_text_of(error)}. torchtitan replaces them with None, or removes them from their container: the "
                f"forward must pass over what is not there, as in x = self.norm(x) if self.norm is not None else x"
            ) from error
        stage_inputs = output
        if isinstance(inputs, Mapping):
            first, *others = inputs
            stage_inputs = {first: output, **{name: inputs[name] for name in others}}
    return output


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _pruned(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """A part that shares the model's weights."""
    part = copy.copy(model)
    children: dict[str, nn.Module | None] = {}
    for name, child in model.named_children():
        if isinstance(child, CONTAINERS):
            kept = {key: entry for key, entry in child.named_children() if f"{name}.{key}" in names}
            children[name] = nn.ModuleDict(kept) if isinstance(child, nn.ModuleDict) else nn.ModuleList(kept.values())
        else:
            children[name] = child if name in names else None
    vars(part)["_modules"] = children
    return part


def _compare(by_parts: Any, whole: Any) -> None:
    split, unsplit = [*tensors_in(by_parts)], [*tensors_in(whole)]
    shapes = [[(tuple(tensor.shape), tensor.dtype) for tensor in tensors] for tensors in (split, unsplit)]
    if shapes[0] != shapes[1]:
        raise SplitError(
            f"the stages, run one after another without each other's modules, return {_shown(shapes[0])}, but the "
            f"whole model {_shown(shapes[1])}: {_REMEDY}"
        )
    for tensor, expected in zip(split, unsplit, strict=True):
        if tensor.is_meta:
            continue
        try:
            torch.testing.assert_close(tensor, expected, equal_nan=True)
        except AssertionError as error:
            raise SplitError(
                f"the stages, run one after another without each other's modules, do not compute what the whole model "
                f"computes: {_REMEDY} ({_text_of(error)})"
            ) from None


def _shown(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}".removeprefix("torch.") for shape, dtype in shapes) or "no tensor"


def _text_of(error: BaseException) -> str:
    """An error in one line, with the model's line in which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith(_NOT_THE_MODELS)), None)
    where = f' in "{frame.line}" ({Path(frame.filename).name}:{frame.lineno})' if frame else ""
    return error_line(error)[:300] + where
