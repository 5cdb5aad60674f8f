"""What intercepts the calls of units while a stage runs: it answers them, runs them, or ends the forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from operator import is_
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from rota.core.errors import PipelineError, SplitError
from rota.models.carving.absent import Absent, ModuleCall, OutputShapes, kind_of, thread_state
from rota.models.carving.cutting import Cutting, StagePart
from rota.models.carving.recording import Output, Recording, Returned
from rota.models.carving.units import PLAIN, flatten, intercept, rebuild, units_at
from rota.models.source_places import place_now

AS_RECORDED = "split with an example that does what this batch does, in the same mode"


@final
class Stopped(BaseException):
    """Raised to leave the forward where a stage ends."""


@final
class Run:
    """Progress of one stage's forward."""

    def __init__(self) -> None:
        self.active = False
        self.is_inside = False  # a unit of the stage runs
        self.call = 0  # the next one
        self.received: dict[Returned, Any] = {}
        self.sent: dict[Returned, Any] = {}
        self.nth: dict[str, int] = {}  # calls of inner modules of the unit that runs
        self.mode: tuple[Any, ...] = ()  # what shapes depend on besides arguments
        #: The kind of the last absent unit, its arguments, and the Absents that it returned.
        self.last: tuple[OutputShapes | None, list[Any], list[Any]] = None, [], []

    def begin(self, received: dict[Returned, Any], device: torch.device) -> None:
        """Begin a forward."""
        self.received, self.sent, self.call = received, {}, 0
        kind = device.type
        has_autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        self.mode = (device, torch.get_autocast_dtype(kind) if has_autocast else None)
        self.active, self.is_inside = True, False

    def end(self) -> dict[Returned, Any]:
        """End the forward; returns the values to send."""
        sent, self.sent, self.received = self.sent, {}, {}
        self.last = None, [], []
        self.active, self.is_inside, thread_state.inside = False, False, None
        return sent

    def deviation(self, what: str) -> PipelineError:
        """The error for a forward that does not do what the recorded one did."""
        return PipelineError(f"{what} at {place_now()}, unlike in the example that was recorded: {AS_RECORDED}")


def install(root: nn.Module, cutting: Cutting, stage: int, run: Run) -> list[OutputShapes]:
    """Intercept the units of a stage's copy of the model. Returns the shape caches."""
    recording, part = cutting.recording, cutting.parts[stage]
    mutated = {label for label in recording.in_set(recording.mutated) if isinstance(label, Returned)}
    leaving = {value for values in part.sent.values() for value in values if part.begin <= value.call}
    calls_of: defaultdict[int, list[int]] = defaultdict(list)
    for call, unit_number in enumerate(recording.calls):
        calls_of[unit_number].append(call)
    shapes: defaultdict[Any, OutputShapes] = defaultdict(OutputShapes)
    for number, module in enumerate(units_at(root, recording.units)):
        outputs = [recording.outputs[call] for call in calls_of[number]]
        recorded = tuple(
            (output.structure, tuple((leaf.argument, leaf.shape, leaf.dtype) for leaf in output.leaves))
            for output in outputs
        )
        known_shapes = shapes[kind_of(module, recorded)]
        calls = {call: _recorded_call(recording, part, call, mutated, leaving) for call in calls_of[number]}
        unit = _Unit(module, number, run, cutting, stage, calls, known_shapes)
        for value in leaving:
            if value.call in calls and value.inner:
                _Inner.at(module.get_submodule(value.inner), value.inner, run).add(value, value in mutated)
        if any(call < part.begin for call in calls):
            vars(module)["forward"] = unit.answer_now
        intercept(module, unit)
    return [*shapes.values()]


class _RecordedCall(NamedTuple):
    """What was recorded of one call of a unit, for one stage: of each leaf that it returned, and of modules in it."""

    output: Output
    values: list[Returned]
    mutated: list[bool]
    leaving: list[bool]
    gives_back: bool  # any of its arguments
    overwrites: bool  # any of its arguments
    inner: list[tuple[str, Output]]  # of modules in the unit, whose outputs hooks take out of it, in the order of calls


def _recorded_call(
    recording: Recording, part: StagePart, call: int, mutated: Set[Returned], leaving: Set[Returned]
) -> _RecordedCall:
    output = recording.outputs[call]
    values = [Returned(call, leaf) for leaf in range(len(output.leaves))]
    inner: list[tuple[str, Output]] = []
    if call < part.begin:
        for leaf in output.leaves:
            if not leaf.is_tensor and leaf.argument is None and type(leaf.value) not in PLAIN:
                raise SplitError(
                    f"{recording.units[recording.calls[call]]} returns a {type(leaf.value).__name__}, which cannot be "
                    "sent to other stages: cut inside that module, or return tensors, tuples, lists and dicts"
                )
        needed = {value for value in part.needed if value.call == call and value.inner}
        inner = [
            (path, inner_output)
            for (called, path, _), inner_output in recording.inner_outputs.items()
            if called == call and any(leaf.inner in needed for leaf in inner_output.leaves)
        ]
    return _RecordedCall(
        output,
        values,
        [value in mutated for value in values],
        [value in leaving for value in values],
        any(leaf.argument is not None for leaf in output.leaves),
        any(leaf.overwritten is not None for leaf in output.leaves),
        inner,
    )


@final
class _Unit:
    """Intercepts one unit's calls on one stage."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        run: Run,
        cutting: Cutting,
        stage: int,
        calls: dict[int, _RecordedCall],
        shapes: OutputShapes,
    ) -> None:
        recording, part = cutting.recording, cutting.parts[stage]
        self._base, self._patched = type(module), vars(module).get("forward")
        self._module, self._number, self._run, self._calls, self._shapes = module, number, run, calls, shapes
        self._path = recording.units[number]
        self._name = f"{self._path} ({type(module).__name__}) on stage {stage}"
        self._order, self._paths = tuple(recording.calls), recording.units
        self._begin, self._end = part.begin, part.end
        self._is_elsewhere = bool(calls) and calls.keys().isdisjoint(range(part.begin, part.end))
        self._ends_stage = number in recording.cut_points and stage < len(cutting.parts) - 1
        self._pending: list[Any] = []  # answers that hooks have yet to see

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        if not run.active and self._is_elsewhere:
            raise PipelineError(
                f"{self._name}, whose weights are on another stage, is called at {place_now()} outside of the stage's "
                "forward, as checkpoint does in the backward: cut where the checkpointed function begins or ends"
            )
        if not run.active or run.is_inside:
            return self._base.__call__(module, *args, **kwargs)
        call = run.call
        if call >= len(self._order) or self._order[call] != self._number:
            expected = (
                f"instead of {self._paths[self._order[call]]}" if call < len(self._order) else "after the last call"
            )
            raise run.deviation(f"{self._name} was called {expected}")
        if call >= self._end:
            raise Stopped
        run.call = call + 1
        if call >= self._begin:
            output = self._run_own(module, self._calls[call], (args, kwargs))
            if self._ends_stage and run.call == self._end:  # no unit may be called after it
                raise Stopped
            return output
        return self._answer(module, self._calls[call], (args, kwargs))

    def _run_own(self, module: nn.Module, recorded: _RecordedCall, call: ModuleCall) -> Any:
        run = self._run
        run.is_inside, thread_state.inside = True, self._name
        run.nth.clear()
        output = self._base.__call__(module, *call[0], **call[1])
        run.is_inside, thread_state.inside = False, None
        structure, leaves = flatten(output)
        if structure != recorded.output.structure:
            raise run.deviation(f"{self._name} returns a different structure")
        arguments = flatten(call)[1] if recorded.gives_back else []
        for leaf, expected, returned, leaves_stage, is_mutated in zip(
            leaves, recorded.output.leaves, recorded.values, recorded.leaving, recorded.mutated, strict=True
        ):
            if expected.argument is not None:
                if not _is_given_back(leaf, arguments[expected.argument]):
                    raise run.deviation(f"{self._name} does not return its argument")
            elif not expected.is_tensor:
                if type(leaf) is not type(expected.value) or (type(leaf) in PLAIN and leaf != expected.value):
                    was = type(expected.value).__name__ if expected.value is not None else "None"
                    raise run.deviation(f"{self._name} returns a {type(leaf).__name__} ({leaf!r:.40}) instead of {was}")
            elif leaves_stage:
                if not isinstance(leaf, Tensor) or isinstance(leaf, Absent):
                    raise run.deviation(f"{self._name} does not return a tensor of this stage")
                run.sent[returned] = leaf.clone() if is_mutated else leaf
        return output

    # --- calls of other stages ------------------------------------------------------------------------------------

    def _answer(self, module: nn.Module, recorded: _RecordedCall, call: ModuleCall) -> Any:
        for path, output in recorded.inner:
            self._show_hooks(module.get_submodule(path), output, call)
        answer = self._answered(module, recorded, call)
        if not (module._forward_hooks or module._forward_pre_hooks):
            return answer
        self._pending.append(answer)
        return self._base.__call__(module, *call[0], **call[1])

    def answer_now(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's forward: returns the pending answer, so that hooks see it, if there is one."""
        return self._pending.pop() if self._pending else self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._patched(*args, **kwargs) if self._patched else self._base.forward(self._module, *args, **kwargs)

    def _answered(self, module: nn.Module, recorded: _RecordedCall, call: ModuleCall) -> Any:
        received, structure = self._run.received, recorded.output.structure
        leaves: list[Any] = []
        arguments = flatten(call)[1] if recorded.gives_back or recorded.overwrites else []
        absents: list[Any] | None = None
        for number, leaf in enumerate(recorded.output.leaves):
            if leaf.argument is None and not leaf.is_tensor:
                leaves.append(leaf.value)
            elif (value := received.get(recorded.values[number])) is not None:
                leaves.append(value.clone() if recorded.mutated[number] else value)
            elif leaf.argument is not None:
                leaves.append(arguments[leaf.argument])
            else:
                if absents is None:
                    absents = self._absents(module, recorded.output, call)
                leaves.append(absents[number])
            overwrites = leaf.overwritten is not None and not isinstance(arguments[leaf.overwritten], Absent)
            if overwrites and not isinstance(leaves[-1], Absent):
                raise PipelineError(
                    f"{self._path} writes into its argument, whose earlier value later stages already hold: let it "
                    "make a new tensor, or cut elsewhere, so that both are on one stage"
                )
        return leaves[0] if structure is None else rebuild(structure, iter(leaves))

    def _absents(self, module: nn.Module, output: Output, call: ModuleCall) -> list[Any]:
        """An Absent per output tensor; reused from the last unit if that was of its kind and got the same objects."""
        values = [*call[0], *call[1].values()]
        shapes, last_values, absents = self._run.last
        if shapes is not self._shapes or len(values) != len(last_values) or not all(map(is_, values, last_values)):
            absents = self._shapes.find(module, self._forward, output, call, self._run.mode)
            self._run.last = self._shapes, values, absents
        return absents

    def _show_hooks(self, inner: nn.Module, output: Output, call: ModuleCall) -> None:
        """Let the hooks of a module in the unit, which is called like this, see what it returned."""
        _, arguments = flatten(call)
        leaves = [
            arguments[leaf.argument]
            if leaf.argument is not None
            else leaf.value
            if leaf.inner is None
            else self._run.received[leaf.inner]
            for leaf in output.leaves
        ]
        value = rebuild(output.structure, iter(leaves))
        for hook in [*inner._forward_hooks.values()]:
            hook(inner, (), value)


def _is_given_back(leaf: Any, argument: Any) -> bool:
    """Whether a unit returns its argument. FSDP's hooks make another tensor of it, in the same memory."""
    if leaf is argument:
        return True
    if any(not isinstance(value, Tensor) or isinstance(value, Absent) for value in (leaf, argument)):
        return False
    same_memory: bool = leaf.data_ptr() == argument.data_ptr()
    return same_memory and leaf.shape == argument.shape and leaf.stride() == argument.stride()


@final
class _Inner:
    """Intercepts a module inside a unit, whose output other stages read because a hook took it out of the unit."""

    def __init__(self, base: type[nn.Module], path: str, run: Run) -> None:
        self._base, self._path, self._run = base, path, run
        self._leaving: dict[tuple[int, int], list[tuple[Returned, bool]]] = defaultdict(list)

    @staticmethod
    def at(module: nn.Module, path: str, run: Run) -> _Inner:
        """The interceptor of this module, installed if it has none."""
        interceptor = vars(module).get("_rota_interceptor")
        if interceptor is None:
            interceptor = _Inner(type(module), path, run)
            intercept(module, interceptor)
        assert isinstance(interceptor, _Inner)
        return interceptor

    def add(self, value: Returned, is_mutated: bool) -> None:
        """Add a value to send."""
        self._leaving[value.call, value.nth].append((value, is_mutated))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self._base.__call__(module, *args, **kwargs)
        run = self._run
        if run.active and run.is_inside:
            nth = run.nth[self._path] = run.nth.get(self._path, -1) + 1
            _, leaves = flatten(output)
            for value, is_mutated in self._leaving[run.call - 1, nth]:
                run.sent[value] = leaves[value.leaf].clone() if is_mutated else leaves[value.leaf]
        return output
