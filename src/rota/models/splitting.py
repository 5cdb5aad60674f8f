"""split: a model cut into stages: at its CutPoints, between the children of an nn.Sequential, or before any module."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from inspect import Parameter
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, final

from torch import nn

from rota.core.errors import SplitError
from rota.cutting import balanced
from rota.models.cutpoint import find_cut_points
from rota.models.elsewhere import refuse_incomplete
from rota.models.stage_edges import StageEdge
from rota.models.stages import Input, Stages
from rota.models.unmodified import Candidates, as_inputs

Cuts: TypeAlias = str | Iterable[int | str]
Value: TypeAlias = tuple[int, Any]  # what a stage returns, or an entry of it: the stage, and the key or None


def split(
    model: nn.Module | Stages,
    num_stages: int,
    cuts: Cuts | None = None,
    *,
    example: Any = None,
    direct_skips: bool = False,
) -> Stages:
    """Cut `model` into stages that together compute the same, with the model's own parameters.

    A model whose forward calls CutPoints is cut at them, and any other before some of its modules: one forward on
    `example` shows what each stage reads and sends. An `nn.Sequential` is cut between its children, without an example.

    Args:
        model: The model, in training mode if it is to be trained. Or stages made by hand, of which neighbours become
            one; `weight` in stage 3 is then `3.weight`.
        num_stages: The number of stages, 1 or more.
        cuts: The CutPoints to cut at, by number in call order or by attribute path (`"cutpoints[2]"`), or the children
            of an `nn.Sequential`, or the stages made by hand, to cut before. For any other model: the modules to cut
            before, by path (`"model.layers.4"`, and `"model.layers.4#2"` before its second call), or patterns of
            modules that a stage may begin with (`"model.layers.*"`). A text is one name or pattern. Without names of
            modules, a model without CutPoints is cut so that parameters are spread evenly, not counting those of
            `nn.Embedding`, which are only looked up. None for others: so that numbers of pieces per stage differ by one
            at most.
        example: A small batch, as a dict of the forward's keyword arguments, or as a tuple. An `nn.Sequential` and
            stages made by hand need none.
        direct_skips: Values from a stage that is not right before the one that reads them travel directly. By default
            they pass through the stages between, so that stages form a chain, as most named schedules require.

    Returns:
        The stages, with `cuts` set to the names of these cuts.

    Raises:
        SplitError: The model cannot be cut like this; the message gives the place in its forward.
    """
    if num_stages < 1:
        raise SplitError(f"num_stages is {num_stages}: give at least 1")
    cuts = [cuts] if isinstance(cuts, str) else cuts
    if isinstance(model, Stages):
        return _split_stages(model, num_stages, cuts)
    refuse_incomplete(model)
    stages = _split_model(model, num_stages, cuts, example, direct_skips)
    stages.unsplit = model
    return stages


def _split_model(model: nn.Module, num_stages: int, cuts: Cuts | None, example: Any, direct_skips: bool) -> Stages:
    if is_sequential(model):
        return _split_sequential(model, num_stages, cuts)
    if num_stages == 1 and example is None:
        return _whole(model, cuts)
    if hasattr(model, "_orig_mod"):
        raise SplitError(
            "the model comes from torch.compile(model), which hides its modules: split the model itself, and compile "
            "its blocks, block.compile(), before or after"
        )
    candidates = Candidates(model, cuts, _example_for(model, example))
    choose = _chosen_cut_points if find_cut_points(model) else _chosen_calls
    return candidates.split(choose(candidates, num_stages, cuts), relay=not direct_skips)


def finest(model: nn.Module | Stages, example: Any = None, cuts: Cuts | None = None) -> tuple[Stages, tuple[str, ...]]:
    """`model` cut wherever `split` can cut it, and the names of these cuts, as `split` takes them, in order.

    One stage, and no names, where it cannot be cut at all.

    Args:
        model: The model, or stages made by hand.
        example: A batch, as `split` takes it; an `nn.Sequential` and stages need none.
        cuts: The cuts to choose from, by name, number or pattern; None: all.

    Raises:
        SplitError: The model cannot be cut like this.
    """
    cuts = [cuts] if isinstance(cuts, str) else cuts
    if isinstance(model, Stages) or is_sequential(model):
        possible = _chosen_among(_made_cuts(model), cuts)
        return split(model, len(possible) + 1, possible), tuple(possible.values())
    if example is None:
        return split(model, 1), ()
    candidates = Candidates(model, cuts, as_inputs(model, example))
    if not find_cut_points(model):
        calls = candidates.possible()
        return candidates.split([*calls]), tuple(calls.values())
    starts = [*(cut_points := candidates.cut_points())]
    possible = _chosen_among(dict(enumerate(cut_points.values())), cuts)
    return candidates.split([starts[number] for number in possible]), tuple(possible.values())


def _made_cuts(model: nn.Module | Stages) -> dict[int, str]:
    """The possible cuts of stages made by hand, or of an `nn.Sequential`: names by the numbers that `split` takes."""
    if isinstance(model, Stages):
        return {stage: str(stage) for stage in range(1, len(model))}
    return {index: name for index, name in enumerate(model._modules) if index > 0}


def _chosen_among(possible: dict[int, str], cuts: Cuts | None) -> dict[int, str]:
    """Those of the possible cuts that numbers, names and patterns stand for; None: all."""
    if cuts is None:
        return possible
    named = {number for cut in cuts for number in _matching_cuts(cut, possible)}
    return {number: name for number, name in possible.items() if number in named}


def _matching_cuts(cut: int | str, possible: Mapping[int, str]) -> list[int]:
    """The numbers of the cuts that a number, a name or a pattern stands for. Raises SplitError if there is none."""
    if isinstance(cut, str) and "*" in cut:
        pattern = _plain(cut)
        names = {number: _plain(name) for number, name in possible.items()}
        alike = {number: name for number, name in names.items() if name.count(".") == pattern.count(".")}
        if numbers := [number for number, name in alike.items() if fnmatchcase(name, pattern)]:
            return numbers
    return [_find(cut, possible)]


def is_sequential(model: nn.Module) -> bool:
    """Whether it is cut between its children, without an example: an `nn.Sequential` without CutPoints."""
    runs_children = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    return runs_children and not find_cut_points(model)


def _example_for(model: nn.Module, example: Any) -> dict[str, Any]:
    if example is not None:
        return as_inputs(model, example)
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters.values()
    first = next((parameter.name for parameter in parameters if parameter.kind in named), "…")
    raise SplitError(
        f"without an example nobody knows what crosses the cuts of {type(model).__name__}: give one small batch, "
        "example=make_batch(1)[0] if your file has a make_batch, or the keyword arguments of its forward, "
        f"example={{{first!r}: …}}; or wire the stages by hand, Stages(modules, edges=...)"
    )


def _chosen_calls(candidates: Candidates, num_stages: int, cuts: Cuts | None) -> list[int]:
    """The calls of modules that stages begin with, in order."""
    possible = candidates.called()
    if not possible and num_stages > 1:
        blocks = candidates.blocks
        what = f"modules in its lists of blocks ({blocks[0]}, …)" if blocks else "list of blocks (nn.ModuleList)"
        raise SplitError(
            f"the forward calls no {what} with this example, so that no stage could begin there: name modules to cut "
            "before, cuts=['encoder', 'head']"
        )
    cuts = None if cuts is None else [*cuts]
    if cuts is None or any(isinstance(cut, str) and "*" in cut for cut in cuts):
        cuts = None
        possible = candidates.spread(num_stages)
        if len(possible) >= num_stages:  # else even the first block needs a cut before it
            possible.pop(min(possible))
    possible.pop(0, None)  # what comes before the forward's first call is no stage
    what = "module that the forward calls and that may start a stage, by default those of lists of blocks"
    how = " by naming modules, such as cuts=['layers.*'] (for a plan, rota autoplan --cuts 'layers.*')"
    return _choose(num_stages, cuts, possible, what, how, candidates.loads([*possible]))


def _chosen_cut_points(candidates: Candidates, num_stages: int, cuts: Cuts | None) -> list[int]:
    """The calls after CutPoints that stages begin with, in order."""
    starts = [*(cut_points := candidates.cut_points())]
    numbers = _choose(num_stages, cuts, dict(enumerate(cut_points.values())), "CutPoint that the forward calls")
    return [starts[number] for number in numbers]


def _whole(model: nn.Module, cuts: Cuts | None) -> Stages:
    _choose(1, cuts, {}, "cut")
    signature = _signature(model)
    defaults = {name: default for name, default in signature.items() if default is not Parameter.empty}
    whole = Stages([model], inputs=[tuple(signature)], input_names=signature, input_defaults=defaults)
    whole.cuts = ()
    return whole


def _split_stages(stages: Stages, num_stages: int, cuts: Cuts | None) -> Stages:
    """Runs of stages made by hand, cut before some of them."""
    possible = _made_cuts(stages)
    chosen = _choose(num_stages, cuts, possible, "stage but the first")
    fewer = _grouped(stages, [0, *chosen, len(stages)])
    fewer.cuts = tuple(possible[stage] for stage in chosen)
    return fewer


def _split_sequential(model: nn.Module, num_stages: int, cuts: Cuts | None) -> Stages:
    if num_stages == 1:
        return _whole(model, cuts)
    _refuse_patches(model)
    names = tuple(_signature(model))
    children: list[Any] = [*model._modules.items()]  # named_children would leave out the second place of a child
    possible = _made_cuts(model)
    starts = _choose(num_stages, cuts, possible, "child after the first")
    modules = []
    for begin, end in pairwise([0, *starts, len(children)]):
        stage = nn.Sequential(OrderedDict(children[begin:end]))
        stage.training = model.training
        modules.append(stage)
    stages = Stages(modules, inputs={0: names}, input_names=names)
    stages.cuts = tuple(possible[start] for start in starts)
    return stages


def _signature(model: nn.Module) -> dict[str, Any]:
    """The names of the forward's inputs with their defaults, `Parameter.empty` for none."""
    parameters = inspect.signature(model.forward).parameters
    for parameter in parameters.values():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise SplitError(
                f"forward of {type(model).__name__} takes {parameter.name!r} as {parameter.kind.description}: stages "
                "read their inputs one by one and by position, so give the forward plain parameters"
            )
    return {name: parameter.default for name, parameter in parameters.items()}


def _refuse_patches(model: nn.Module) -> None:
    """Stages run what the model's class does, so nothing may be hung on the model object itself."""
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
    if any(hooks) or "forward" in vars(model):
        raise SplitError(
            f"this {type(model).__name__} has hooks or a forward of its own, which no stage would run: put hooks on "
            "its sub-modules, and the forward into its class"
        )


def _choose(
    num_stages: int,
    cuts: Cuts | None,
    possible: Mapping[int, str],
    what: str,
    how: str = "",
    loads: Sequence[int] = (),
) -> list[int]:
    """The numbers of the cuts to make, in order, out of the possible ones and their names; `how` one adds more.

    `loads`: of the pieces between all possible cuts, which stages share evenly; by default they are alike.
    """
    needed = num_stages - 1
    names = _listed(possible)
    if len(possible) < needed:
        raise SplitError(
            f"{num_stages} stages need {needed} cuts, but there are {len(possible)} possible ones, one for each "
            f"{what}: {names}. Add some{how}, or ask for at most {len(possible) + 1} stages"
        )
    if cuts is None:
        numbers, num_pieces = [*possible], len(possible) + 1
        if loads:
            return [numbers[boundary - 1] for boundary in balanced(loads, num_stages)[1:-1]]
        return [numbers[stage * num_pieces // num_stages - 1] for stage in range(1, num_stages)]
    cuts = [*cuts]
    chosen = [_find(cut, possible) for cut in cuts]
    if len(cuts) != needed:
        raise SplitError(f"cuts {cuts} are {len(cuts)}, but {num_stages} stages need {needed}: give as many")
    if len(set(chosen)) < len(chosen):
        twice = next(cut for cut, number in zip(cuts, chosen, strict=True) if chosen.count(number) > 1)
        raise SplitError(f"cuts {cuts} have {twice!r} twice: give {needed} different ones of {names}")
    return sorted(chosen)


def _listed(possible: Mapping[int, str]) -> str:
    return ", ".join(f"{number} ({name})" for number, name in possible.items()) or "none"


def _find(cut: int | str, possible: Mapping[int, str]) -> int:
    if isinstance(cut, int):
        if cut in possible:
            return cut
        hint = "."
    else:
        by_name = {_plain(name): number for number, name in possible.items()}
        if _plain(cut) in by_name:
            return by_name[_plain(cut)]
        close = get_close_matches(_plain(cut), by_name, n=1)
        hint = f", did you mean {possible[by_name[close[0]]]!r}?" if close else "."
    raise SplitError(f"cuts has {cut!r}, which is not a possible cut{hint} Possible cuts are: {_listed(possible)}")


def _plain(path: str) -> str:
    """An attribute path with all steps alike: `cuts[2]` and `cuts['2']` are `cuts.2`."""
    return re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", path)


# --- stages made by hand ----------------------------------------------------------------------------------------------


class _Member(NamedTuple):
    """A stage in a group: its number, the values that it reads, and the positions of its inputs among the group's."""

    number: int
    reads: tuple[Value, ...]
    inputs: tuple[int, ...]


def _grouped(stages: Stages, boundaries: Sequence[int]) -> Stages:
    """Stages of which the new stage i is those from boundaries[i] to boundaries[i + 1] - 1.

    What is named `weight` in stage 3 is `3.weight` then, however the stages are grouped.

    Raises:
        SplitError: An edge leads back, so that neighbours cannot run one after the other.
    """
    back = next((edge for edge in stages.edges if edge.source > edge.target), None)
    if back is not None:
        raise SplitError(f"edge {back} leads back: number the stages in the order in which they run")
    runs = [range(*pair) for pair in pairwise(boundaries)]
    group_of = {stage: group for group, run in enumerate(runs) for stage in run}
    parcels = _parcels(stages, group_of)
    inputs = [tuple(dict.fromkeys(wanted for stage in run for wanted in stages.inputs[stage])) for run in runs]
    modules = [_Group(stages, run, parcels, inputs[group], group) for group, run in enumerate(runs)]
    edges = [(*pair, pair[1]) for pair in sorted(parcels)]
    return Stages(modules, edges, inputs, stages.input_names, stages.input_defaults)


def _parcels(stages: Stages, group_of: dict[int, int]) -> dict[tuple[int, int], tuple[Value, ...]]:
    """For two groups the values that one sends the other, each once."""
    parcels: dict[tuple[int, int], dict[Value, None]] = {}
    for edge in stages.edges:
        pair = group_of[edge.source], group_of[edge.target]
        if pair[0] != pair[1]:
            parcels.setdefault(pair, {})[edge.source, edge.key] = None
    return {pair: tuple(values) for pair, values in parcels.items()}


@final
class _Group(nn.Module):
    """Some stages, one after the other; returns for each later group a tuple of values, by the group's number."""

    def __init__(
        self,
        stages: Stages,
        run: range,
        parcels: dict[tuple[int, int], tuple[Value, ...]],
        inputs: tuple[Input, ...],
        group: int,
    ) -> None:
        super().__init__()
        self._received = [values for (_, target), values in sorted(parcels.items()) if target == group]
        self._sent = {target: values for (source, target), values in sorted(parcels.items()) if source == group}
        self._members = [
            _Member(
                stage,
                tuple((edge.source, edge.key) for edge in stages.incoming(stage)),
                tuple(inputs.index(wanted) for wanted in stages.inputs[stage]),
            )
            for stage in run
        ]
        for stage in run:
            self.add_module(str(stage), stages[stage])

    def forward(self, *values: Any) -> Any:
        """The group's output, given the parcels of its incoming edges and its inputs."""
        inputs = values[len(self._received) :]
        received = {
            value: item
            for parcel, items in zip(self._received, values, strict=False)
            for value, item in zip(parcel, items, strict=True)
        }
        outputs: dict[int, Any] = {}

        def read(value: Value) -> Any:
            source, key = value
            return received[value] if value in received else StageEdge(source, -1, key).take(outputs[source])

        for number, reads, positions in self._members:
            arguments = (*map(read, reads), *(inputs[position] for position in positions))
            outputs[number] = self.get_submodule(str(number))(*arguments)
        if not self._sent:
            return outputs[self._members[-1].number]
        return {target: tuple(map(read, parcel)) for target, parcel in self._sent.items()}
