"""Stages: the modules of a pipeline, how values flow between them, and what each reads of the step's batch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch
from torch import nn

from rota.core.errors import PipelineError, SplitError
from rota.models.aliases import refuse_aliases
from rota.models.carving.stage import CarvedStage
from rota.models.replacing import move
from rota.models.stage_edges import StageEdge, parse_edges, topological_order

Input: TypeAlias = int | str
Tie: TypeAlias = tuple[tuple[int, str], ...]
Inputs: TypeAlias = Sequence[Input | Iterable[Input]] | Mapping[int, Input | Iterable[Input]]


_HEADER = ("stage", "holds", "parameters", "bytes", "reads", "sends to")  # of `Stages.table`
_NUMBERED = re.compile(r"((?:.*\.)?)(\d+)")


class Carried(NamedTuple):
    """A tensor that crosses cuts, with the shape and the bytes that it had in the example."""

    source: int
    target: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"{self.source} -> {self.target}  {self.name}  {self.dtype}[{shape}]  {self.num_bytes:,} bytes"


@final
class Stages:
    """The modules of a pipeline as a DAG.

    Stage i is called `modules[i](*values of its incoming edges, *its inputs)`, both in the order given. Values that
    travel along edges are tensors, tuples, lists and dicts of tensors, ints, floats, bools and None.

    Args:
        modules: One module per stage.
        edges: `(source, target)` passes on the source's whole output, `(source, target, key)` passes on `output[key]`.
            Each is one argument, also if it is a tuple: `torch.distributed.pipelining` would unpack that. At most one
            edge joins two stages. None: a chain.
        inputs: What each stage reads of a batch, by position (int) or name (str). None: input 0 for every stage
            without incoming edges, nothing for the others.
        input_names: The inputs' names by position, to read named inputs out of a tuple.
        input_defaults: Values of inputs that a batch may leave out.
        names: For each stage the names of its weights in the whole model: what comes in front of all of them
            (`"layers.4"`), or by path of a module in the stage its path in the model (`{"0": "layers.4"}`). With them a
            checkpoint resumes on other cuts. None: the names in the stage's module.

    Raises:
        SplitError: For edges, inputs or names that do not fit the modules, and for weights that share memory without
            being one parameter.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        edges: Iterable[Sequence[Any]] | None = None,
        inputs: Inputs | None = None,
        input_names: Iterable[str] | None = None,
        input_defaults: Mapping[str, Any] | None = None,
        names: Iterable[str | Mapping[str, str]] | None = None,
    ) -> None:
        self.modules: Final = _check_modules(modules)
        self._names = _parse_names(names, self.modules)
        numbers = range(len(self.modules))
        self.edges: Final = parse_edges(pairwise(numbers) if edges is None else edges, len(self.modules))
        self._incoming: Final = [tuple(edge for edge in self.edges if edge.target == stage) for stage in numbers]
        self._outgoing: Final = [tuple(edge for edge in self.edges if edge.source == stage) for stage in numbers]
        self._order: Final = topological_order(self.edges, len(self.modules))
        self.input_names: Final = (input_names,) if isinstance(input_names, str) else tuple(input_names or ())
        self.input_defaults: Final = dict(input_defaults or {})
        roots = {stage: 0 for stage in numbers if not self._incoming[stage]}
        self.inputs: Final = _parse_inputs(roots if inputs is None else inputs, len(self.modules), self.input_names)
        #: The number of copies of one model that these stages are, see `repeated`.
        self.num_components = 1
        #: The names of the cuts that `split` made; None for stages made by hand.
        self.cuts: tuple[str, ...] | None = None
        #: The model that these stages are, or a function that makes it, to verify them by; `split` sets it.
        self.unsplit: nn.Module | Callable[[], nn.Module] | None = None
        #: What each cut sends for the example that `split` got; empty for stages that were made without one.
        self.carried: tuple[Carried, ...] = ()
        #: The inputs that a batch may have; None: any. What an example did not show, no stage would read.
        self.known_inputs: frozenset[str] | None = None
        refuse_aliases(self.modules, self.name_in_model)
        #: `ties` of the modules as they were given: `fully_shard` breaks ties.
        self.first_ties: Final = self.ties

    def __getstate__(self) -> dict[str, Any]:
        """All but the unsplit model, which may be of a class that cannot be pickled, as its stages can."""
        return {**vars(self), "unsplit": None}

    def __len__(self) -> int:
        return len(self.modules)

    def __getitem__(self, stage: int) -> nn.Module:
        return self.modules[stage]

    def incoming(self, stage: int) -> tuple[StageEdge, ...]:
        """The edges that `stage` reads, in the order of its arguments."""
        return self._incoming[stage]

    def outgoing(self, stage: int) -> tuple[StageEdge, ...]:
        """The edges that carry the output of `stage`."""
        return self._outgoing[stage]

    def order(self) -> tuple[int, ...]:
        """All stages, each after those it reads; of those ready, the smallest first."""
        return self._order

    @property
    def sinks(self) -> tuple[int, ...]:
        """For each copy of the model the stage whose output no other reads: its output makes the loss."""
        sinks = tuple(stage for stage in range(len(self)) if not self.outgoing(stage))
        if len(sinks) > self.num_components:
            raise SplitError(
                f"stages {', '.join(map(str, sinks))} send their output nowhere, but the loss needs exactly one "
                "final stage: add edges that lead all of them into one"
            )
        return sinks

    @property
    def sink(self) -> int:
        """The first of `sinks`, usually the only one."""
        return self.sinks[0]

    @property
    def ties(self) -> tuple[Tie, ...]:
        """For each parameter that several stages use all (stage, name in that stage's module)."""
        places: dict[nn.Parameter, list[tuple[int, str]]] = {}
        for stage, module in enumerate(self.modules):
            for name, parameter in module.named_parameters():
                places.setdefault(parameter, []).append((stage, name))
        return tuple(tuple(tied) for tied in places.values() if len(tied) > 1)

    def repeated(self, times: int) -> Stages:
        """The components of a bidirectional plan: `times` copies that share all weights.

        Stage c * n + s is copy c of stage s; micro-batch m passes through copy m mod `times`.
        """
        n = len(self)
        copies = Stages(
            self.modules * times,
            [(c * n + a, c * n + b, key) for c in range(times) for a, b, key in self.edges],
            self.inputs * times,
            self.input_names,
            self.input_defaults,
        )
        return copies._known_as(self)

    def with_modules(self, modules: Iterable[nn.Module]) -> Stages:
        """The same stages with other modules, as when each is wrapped."""
        return Stages(modules, self.edges, self.inputs, self.input_names, self.input_defaults)._known_as(self)

    def _known_as(self, other: Stages) -> Stages:
        times = len(self) // len(other)
        self._names = None if other._names is None else other._names * times
        self.num_components, self.unsplit = times * other.num_components, other.unsplit
        self.cuts, self.carried, self.known_inputs = other.cuts, other.carried, other.known_inputs
        return self

    def pick_inputs(self, stage: int, batch: Any) -> tuple[Any, ...]:
        """What `stage` reads of a batch: a lone tensor, a tuple of inputs, or a dict of inputs by name."""
        if self.known_inputs is not None and isinstance(batch, Mapping) and not batch.keys() <= self.known_inputs:
            unknown = [name for name in batch if name not in self.known_inputs and batch[name] is not None]
            if unknown:
                raise PipelineError(
                    f"the batch has {', '.join(map(repr, unknown))}, which the example that the model was split with "
                    f"did not have ({', '.join(map(repr, sorted(self.known_inputs)))}), so no stage reads it: add it "
                    "to the example, or leave it out"
                )
        return tuple([self._pick(stage, wanted, batch) for wanted in self.inputs[stage]])  # a list, as it is faster

    def _pick(self, stage: int, wanted: Input, batch: Any) -> Any:
        name, position = self._name_and_position(wanted)
        if isinstance(batch, Mapping):
            if name in batch:
                return batch[name]
            has = f"a dict with {', '.join(map(repr, batch)) or 'nothing'}"
        else:
            values = batch if isinstance(batch, tuple | list) else (batch,)
            if position is not None and position < len(values):
                return values[position]
            has = f"{len(values)} by position"
        if name in self.input_defaults:
            return self.input_defaults[name]
        raise PipelineError(
            f"stage {stage} reads input {wanted!r}, which the batch lacks (it has {has}; the inputs' names are "
            f"{', '.join(map(repr, self.input_names)) or 'not given'}): add it to the batch, or give it a default "
            "in input_defaults"
        )

    def _name_and_position(self, wanted: Input) -> tuple[str | None, int | None]:
        if isinstance(wanted, str):
            return wanted, self.input_names.index(wanted) if wanted in self.input_names else None
        return self.input_names[wanted] if wanted < len(self.input_names) else None, wanted

    def shares_inputs(self, stage: int) -> bool:
        """Whether another stage reads an input that `stage` reads, of the same copy of the model."""
        num_stages = len(self) // self.num_components
        first = stage - stage % num_stages
        others = (s for s in range(first, first + num_stages) if s != stage)
        own, of_others = (
            {self._name_and_position(wanted) for reader in readers for wanted in self.inputs[reader]}
            for readers in ([stage], others)
        )
        return not own.isdisjoint(of_others)

    def call(self, stage: int, edge_values: Iterable[Any], batch: Any) -> Any:
        """The output of `stage`, given the values of its incoming edges and the batch."""
        arguments = (*edge_values, *self.pick_inputs(stage, batch))
        try:
            return self.modules[stage](*arguments)
        except TypeError as error:
            self.explain_arguments(error, stage, arguments)
            raise

    def explain_arguments(self, error: TypeError, stage: int, arguments: Sequence[Any]) -> None:
        """Raises PipelineError if the forward of `stage` does not take these arguments, with what they are."""
        module = self.modules[stage]
        try:
            inspect.signature(module.forward).bind(*arguments)
        except (TypeError, ValueError) as mismatch:
            values = [f"what stage {edge.source} returns" for edge in self.incoming(stage)]
            values += [f"input {name!r}" for name in self.inputs[stage]]
            hint = ""
            if any(isinstance(value, tuple) for value in arguments[: len(self.incoming(stage))]):
                hint = "; a tuple that a stage returns is one argument, so unpack it in the forward: a, b = values"
            raise PipelineError(
                f"stage {stage} ({type(module).__name__}) is called with {', '.join(values) or 'nothing'}, which "
                f"its forward does not take ({mismatch}){hint}"
            ) from error

    def run(self, batch: Any) -> Any:
        """Run all stages here, one after another, on one batch; return the sink's output."""
        outputs: dict[int, Any] = {}
        for stage in self.order():
            values = [edge.take(outputs[edge.source]) for edge in self.incoming(stage)]
            outputs[stage] = self.call(stage, values, batch)
        return outputs[self.sink]

    def to(self, device: torch.device | str, stages: Iterable[int] | None = None) -> Stages:
        """Move weights and buffers to `device`; returns the same `Stages`. Do it before stages are wrapped.

        They stay the same objects, so ties between stages remain.

        Args:
            device: As for `nn.Module.to`, such as `rota.local_device()`.
            stages: The stages to move, such as `rota.local_stages(plan, mesh)`; None moves all.

        Raises:
            PipelineError: A tensor has no memory yet (it is on meta), or there is no such stage.
        """
        target = torch.device(device)
        inside = [module for stage in self.modules for module in stage.modules()]
        for stage in range(len(self)) if stages is None else sorted({*stages}):
            if not 0 <= stage < len(self):
                raise PipelineError(f"stages has stage {stage}, but the stages are 0 to {len(self) - 1}")
            module = self.modules[stage]
            for name, tensor in chain(module.named_parameters(), module.named_buffers()):
                if tensor.is_meta:
                    raise PipelineError(
                        f"{name} of stage {stage} has no memory (it is on meta); call rota.materialize(stages, "
                        "rota.local_stages(plan, mesh), device=rota.local_device()) instead"
                    )
                move(tensor, target, inside)
            module.to(target)  # what it holds besides: its own _apply knows
        return self

    def num_parameters(self, stage: int) -> int:
        """The number of elements of the parameters of `stage`, trainable or frozen."""
        return sum(parameter.numel() for parameter in self.modules[stage].parameters())

    def name_in_model(self, stage: int, name: str) -> str:
        """What the whole model calls what the module of `stage` calls `name`."""
        if self._names is None:
            return name
        paths = self._names[stage]
        steps = name.split(".")
        for length in range(len(steps), -1, -1):
            if (path := paths.get(".".join(steps[:length]))) is not None:
                return ".".join([*filter(None, [path]), *steps[length:]])
        return name

    def named_parameters(self, stages: Iterable[int] | None = None) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, and its name in the first stage that has it, the same whichever rank asks.

        Where a name stands for several parameters, all names get their stage in front, `0.weight`.

        Args:
            stages: The stages whose parameters are given; all by default.

        Returns:
            The names and parameters, in the order of the stages.
        """
        named = [
            (stage, self.name_in_model(stage, name), parameter)
            for stage, module in enumerate(self.modules)
            for name, parameter in module.named_parameters()
        ]
        clash = len({name for _, name, _ in named}) < len({(name, parameter) for _, name, parameter in named})
        modules = self.modules if stages is None else [self.modules[stage] for stage in stages]
        left = {parameter for module in modules for parameter in module.parameters()}
        for stage, name, parameter in named:
            if parameter in left:
                left.remove(parameter)
                yield (f"{stage}.{name}" if clash else name), parameter

    def table(self) -> str:
        """The cut as text, one line per stage: what it holds, its size, what it reads and where it sends.

        Below it `carried`, one line per value.
        """
        rows = [_HEADER]
        for stage, module in enumerate(self.modules):
            rows.append(
                (
                    str(stage),
                    holds(module),
                    f"{self.num_parameters(stage):,}",
                    f"{sum(parameter.nbytes for parameter in module.parameters()):,}",
                    ", ".join(map(str, self.inputs[stage])) or "-",
                    ", ".join(str(edge.target) for edge in self.outgoing(stage)) or "-",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join([*lines, *map(str, self.carried)])


def _check_modules(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    checked = tuple(modules)
    if not checked:
        raise SplitError("modules is empty: give at least one stage")
    for stage, module in enumerate(checked):
        if not isinstance(module, nn.Module):
            raise SplitError(f"modules[{stage}] is a {type(module).__name__}: every stage must be an nn.Module")
    return checked


def _parse_names(
    names: Iterable[str | Mapping[str, str]] | None, modules: tuple[nn.Module, ...]
) -> tuple[dict[str, str], ...] | None:
    """By stage, and by path of a module in it, the path in the model; "" is the stage's module itself."""
    if names is None:
        return None
    if isinstance(names, str):
        raise SplitError(f"names is the text {names!r}: give a list with one entry per stage")
    parsed = tuple({"": paths} if isinstance(paths, str) else dict(paths) for paths in names)
    if len(parsed) != len(modules):
        raise SplitError(f"names has {len(parsed)} entries for {len(modules)} stages: give one per stage")
    for stage, (paths, module) in enumerate(zip(parsed, modules, strict=True)):
        own = {path for path, _ in (*module.named_modules(remove_duplicate=False), *module.named_parameters())}
        if unknown := sorted(paths.keys() - own):
            raise SplitError(
                f"names[{stage}] has {unknown[0]!r}, which is not a module or weight of stage {stage}, a "
                f"{type(module).__name__}: give paths as its named_modules() has them"
            )
    return parsed


def _parse_inputs(inputs: Inputs, num_stages: int, names: tuple[str, ...]) -> tuple[tuple[Input, ...], ...]:
    if isinstance(inputs, str):
        raise SplitError(f"inputs is the text {inputs!r}: give a list with one entry per stage, or a dict")
    if not isinstance(inputs, Mapping):
        if len(inputs) != num_stages:
            raise SplitError(f"inputs has {len(inputs)} entries for {num_stages} stages: give one per stage, or a dict")
        inputs = dict(enumerate(inputs))
    for stage in inputs:
        if not 0 <= stage < num_stages:
            raise SplitError(f"inputs names stage {stage!r}: use stages 0 to {num_stages - 1}")
    read = {stage: (reads,) if isinstance(reads, int | str) else tuple(reads) for stage, reads in inputs.items()}
    for stage, wanted in ((stage, wanted) for stage, reads in read.items() for wanted in reads):
        if not isinstance(wanted, int | str) or (isinstance(wanted, int) and wanted < 0):
            raise SplitError(f"inputs[{stage}] has {wanted!r}: give positions (0, 1, ...) or names")
        if isinstance(wanted, str) and names and wanted not in names:
            raise SplitError(f"inputs[{stage}] has {wanted!r}, which is not one of input_names {names}")
    return tuple(read.get(stage, ()) for stage in range(num_stages))


# --- what a stage holds, as text --------------------------------------------------------------------------------------


def holds(module: nn.Module) -> str:
    """What a stage holds, by name: `embed, blocks.0-2`; its class if nothing in it has a name."""
    if isinstance(module, CarvedStage):
        return ", ".join(condense(module.holds)) or "-"
    if not any(module.children()):
        return type(module).__name__
    return ", ".join(condense(_names(module))) or "-"


def _names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of what a stage holds, looking through modules that only contain others, as ModuleList does."""
    yield from (prefix + name for name, _ in module.named_parameters(recurse=False))
    for name, child in module.named_children():
        if type(child) in (nn.Module, nn.ModuleList, nn.ModuleDict):
            yield from _names(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def condense(names: Iterable[str]) -> list[str]:
    """Runs of numbered neighbours as one: a, b.0, b.1, b.2 -> a, b.0-2."""
    runs: list[tuple[str, int | None, int | None]] = []  # what comes before the number; first and last number
    for name in names:
        match = _NUMBERED.fullmatch(name)
        before, number = (match[1], int(match[2])) if match else (name, None)
        if runs and number is not None and (runs[-1][0], runs[-1][2]) == (before, number - 1):
            runs[-1] = (before, runs[-1][1], number)
        else:
            runs.append((before, number, number))
    return [
        before if first is None else f"{before}{first}" if first == last else f"{before}{first}-{last}"
        for before, first, last in runs
    ]
