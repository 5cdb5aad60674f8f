"""Models as Stages, by a recording of their forward: cut at CutPoints, or before modules that are named or found."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from inspect import Parameter
from itertools import pairwise
from typing import Any, final

from torch import Tensor, nn

from rota.core.errors import SplitError
from rota.models.carving.cutting import Cutting, cut_recording
from rota.models.carving.recorder import record
from rota.models.carving.stage import CarvedStage, LeftOut, StageInputs
from rota.models.carving.units import units_at
from rota.models.cutpoint import find_cut_points
from rota.models.stage_edges import StageEdge
from rota.models.stages import Carried, Stages

_MOST_NEAR = 3  # modules that an error names


def find_blocks(model: nn.Module) -> list[str]:
    """The modules where stages may begin by default: those with parameters in the outermost lists or dicts of modules.

    A dict counts if its modules are of one class, as torchtitan's layers are; others hold the parts of a model by name.
    A dict or an `nn.Sequential` of one class also counts, instead of the lists inside it: a block may have experts.
    Lists of one count if there are no others, as in models that call their only block repeatedly.
    """
    for least in (2, 1):
        for container in (nn.ModuleList, nn.ModuleDict, nn.Sequential):
            if blocks := _in_containers(model, container, least):
                return blocks
    return []


def _in_containers(module: nn.Module, container: type[nn.Module], least: int, path: str = "") -> list[str]:
    blocks: list[str] = []
    for name, child in module.named_children():
        inside = f"{path}.{name}".lstrip(".")
        having = {key: block for key, block in child.named_children() if any(True for _ in block.parameters())}
        if len(having) >= least and _holds_blocks(child, container, len({*map(type, having.values())}) == 1):
            blocks += [f"{inside}.{key}" for key in having]
        else:
            blocks += _in_containers(child, container, least, inside)
    return blocks


def _holds_blocks(module: nn.Module, container: type[nn.Module], is_of_one_class: bool) -> bool:
    if isinstance(module, container):
        return is_of_one_class or not isinstance(module, nn.ModuleDict)
    has_one_inside = any(isinstance(inner, container) for inner in module.modules())
    return is_of_one_class and isinstance(module, (nn.ModuleDict, nn.Sequential)) and has_one_inside


def matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The paths of modules that patterns name, `model.layers.*`; a star stands for one step of a path.

    What follows a `#` is left out: it is the number of a call.

    Raises SplitError if a pattern names no module, or if one of these modules is inside another.
    """
    names = [name for name, _ in model.named_modules() if name]
    pattern_of: dict[str, str] = {}  # the first one that names each path
    for pattern in patterns:
        path = pattern.partition("#")[0].replace("[", ".").replace("]", "")
        named = [name for name in names if name.count(".") == path.count(".") and fnmatchcase(name, path)]
        if not named:
            raise SplitError(
                f"cuts has {pattern!r}, which names no module of {type(model).__name__}{_near(path, names)}"
            )
        for name in named:
            pattern_of.setdefault(name, pattern)
    for name, pattern in pattern_of.items():
        outer = next((other for other in pattern_of if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise SplitError(
                f"cuts has {pattern_of[outer]!r} and {pattern!r}, but {name} is inside {outer}, and modules that may "
                f"start a stage must not contain each other: leave out one of the two, or name only parts of {outer}"
            )
    return [*pattern_of]


def _near(path: str, names: Sequence[str]) -> str:
    """What of the model's modules may be meant: those with the same last steps, else those with similar names."""
    numbers = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
    known = [*dict.fromkeys(numbers.sub("*", name) for name in names)] if "*" in path else names
    near = [name for name in known if name.endswith(f".{path}")] or get_close_matches(path, known)
    return f"; did you mean {' or '.join(map(repr, near[:_MOST_NEAR]))}?" if near else ""


def as_inputs(model: nn.Module, example: Any) -> dict[str, Any]:
    """The values of a batch, by the names of the forward's parameters."""
    if isinstance(example, Mapping):
        return dict(example)
    values = example if isinstance(example, (tuple, list)) else (example,)
    names = [
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(names) < len(values):
        raise SplitError(
            f"example has {len(values)} values by position, but the forward of {type(model).__name__} takes "
            f"{len(names)}: give the example as a dict of its keyword arguments"
        )
    return dict(zip(names, values, strict=False))


@final
class Candidates:
    """A model, recorded, with its CutPoints, or else the modules that a stage may begin with."""

    def __init__(self, model: nn.Module, cuts: Iterable[int | str] | None, inputs: Mapping[str, Any]) -> None:
        self._model, self._inputs = model, inputs
        named = [cut for cut in cuts or () if isinstance(cut, str)]
        self._names_calls = any("#" in cut for cut in named)
        #: The modules that a stage may begin with, none inside another: those that `cuts` names, or `find_blocks`.
        self.blocks = [] if find_cut_points(model) else matching(model, named) if named else find_blocks(model)
        self._recording = record(model, self.blocks, inputs)

    def called(self) -> dict[int, str]:
        """The calls of modules that a stage may begin with, in order: `layers.0`, and `layers.0#2` for the second."""
        recording = self._recording
        return {
            call: recording.call_name(call)
            for call, unit in enumerate(recording.calls)
            if recording.units[unit] in self.blocks
        }

    def cut_points(self) -> dict[int, str]:
        """The calls that follow those of CutPoints, with the names of these, in order."""
        recording = self._recording
        ends = (call + 1 for call in range(len(recording.calls)) if recording.is_cut_point(call))
        return {start: recording.cut_name(start) for start in ends}

    def spread(self, num_stages: int) -> dict[int, str]:
        """Those of `called` that stages begin with by default: first calls of modules, or all if these are too few.

        Stages that call the same module have its weights in common.
        """
        called = self.called()
        first = {call: name for call, name in called.items() if "#" not in name}
        return first if len(first) >= num_stages else called

    def possible(self) -> dict[int, str]:
        """As `spread` for two stages or more, but only those before which a cut is possible."""

        def can_be_cut(call: int) -> bool:
            try:
                cut_recording(self._recording, [call], ())
            except SplitError:
                return False
            return True

        calls = self.called() if self._names_calls else self.spread(2)
        return {call: name for call, name in calls.items() if call > 0 and can_be_cut(call)}

    def loads(self, starts: Sequence[int]) -> list[int]:
        """How much is computed before the first of these calls, and from each to the next: parameters, at least 1.

        Those of embeddings do not count: they are looked up. A module that is called twice counts twice.
        """
        recording = self._recording
        of_units = [_num_multiplied(unit) for unit in units_at(self._model, recording.units)]
        of_calls = [of_units[unit] for unit in recording.calls]
        return [1 + sum(of_calls[begin:end]) for begin, end in pairwise([0, *starts, len(of_calls)])]

    def split(self, calls: Sequence[int], *, relay: bool = True) -> Stages:
        """Stages that begin at these calls. `relay`: see `cut_recording`."""
        model, recording, inputs = self._model, self._recording, self._inputs
        names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
        cutting = cut_recording(recording, calls, names, relay=relay)
        signature = inspect.signature(model.forward).parameters
        positional = [name for name, p in signature.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        optional = [name for name in inputs if name not in signature or signature[name].default is not Parameter.empty]
        inputs_of_stages = _stage_inputs(cutting, inputs)
        modules, edges = [], []
        for stage, stage_inputs in enumerate(inputs_of_stages):
            # The shapes of inputs that later stages do not read: each of them gets these from its first source.
            sizes = {name for later in inputs_of_stages if later.sources[:1] == (stage,) for name in later.sized}
            modules.append(CarvedStage(model, cutting, stage, stage_inputs, sorted(sizes)))
            edges += [StageEdge(source, stage, stage) for source in stage_inputs.sources]
        stages = Stages(
            modules,
            edges,
            [stage_inputs.inputs for stage_inputs in inputs_of_stages],
            [*positional, *(name for name in inputs if name not in positional)],
            dict.fromkeys(optional, LeftOut),
        )
        stages.cuts, stages.unsplit = tuple(recording.cut_name(call) for call in calls), model
        stages.known_inputs, stages.carried = frozenset(inputs), tuple(_carried(cutting))
        return stages


def _num_multiplied(module: nn.Module) -> int:
    inside = (inner for inner in module.modules() if not isinstance(inner, (nn.Embedding, nn.EmbeddingBag)))
    return sum(parameter.numel() for inner in inside for parameter in inner.parameters(recurse=False))


def _carried(cutting: Cutting) -> Iterator[Carried]:
    for source, part in enumerate(cutting.parts):
        for target, values in part.sent.items():
            for value in values:
                leaf = cutting.recording.output_of(value).leaves[value.leaf]
                assert leaf.dtype is not None
                num_bytes = math.prod(leaf.shape) * leaf.dtype.itemsize
                dtype = str(leaf.dtype).removeprefix("torch.")
                yield Carried(source, target, cutting.recording.value_name(value), leaf.shape, dtype, num_bytes)


def _stage_inputs(cutting: Cutting, inputs: Mapping[str, Any]) -> list[StageInputs]:
    """What each stage is called with. It gets the shapes of tensors that it does not read, from its first source."""
    inputs_of_stages = []
    for stage, part in enumerate(cutting.parts):
        sources = tuple(source for source, earlier in enumerate(cutting.parts) if stage in earlier.sent)
        sized = {
            name: value.dtype
            for name, value in inputs.items()
            if sources and type(value) is Tensor and name not in part.inputs
        }
        read = tuple(name for name in inputs if name not in sized)
        inputs_of_stages.append(StageInputs(sources, read, sized))
    return inputs_of_stages
