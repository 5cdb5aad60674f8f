"""`ReneDAG`: all instructions, which one waits for which by what rule, and when each may run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, final, get_type_hints

from rota.compat.rene import energy
from rota.compat.rene.instruction import Backward, Forward, Instruction, ReneError, exact_duration, in_whole_units
from rota.core.taskgraph import CycleError, TaskGraph

Rule = Callable[..., bool]
Schedule = Callable[[int, int, int], Iterable[Instruction]]
Durations = Mapping[type[Instruction], Sequence[float]]
TimeCosts = Mapping[type[Instruction], Mapping[int, Sequence[tuple[float, float, Any]]]]


def forward_dep(inst1: Forward, inst2: Forward) -> bool:
    """Return whether `inst2` is the same micro-batch's forward on the next stage."""
    return inst1.micro_batch_id == inst2.micro_batch_id and inst1.stage_id + 1 == inst2.stage_id


def backward_dep(inst1: Backward, inst2: Backward) -> bool:
    """Return whether `inst2` is the same micro-batch's backward on the previous stage."""
    return inst1.micro_batch_id == inst2.micro_batch_id and inst1.stage_id == inst2.stage_id + 1


@final
class ReneDAG:
    """The instructions of all stages; each stage runs its instructions one after the other.

    Args:
        schedule_type: Called with (num_stages, num_micro_batches, stage_id), it returns that stage's instructions: a
            `PipelineSchedule` class, or any callable that does so.
        num_stages: The number of pipeline stages.
        num_micro_batches: The number of micro-batches of a step.
        durations: {Forward: [of stage 0, of stage 1, …], …}. None: instructions have their own durations.
        dependency_rules: Functions of two instructions that return whether the second waits for the first. Each is
            called for every pair of instructions that fits its annotations.
        time_costs: {Forward: {stage: [(duration, cost, frequency), …]}, …}, instead of `durations`. The slowest option
            is the initial one.

    Raises:
        ReneError: If an argument is wrong, or instructions wait for each other.
    """

    def __init__(
        self,
        schedule_type: Schedule,
        num_stages: int,
        num_micro_batches: int,
        durations: Durations | None = None,
        dependency_rules: Sequence[Rule] = (forward_dep, backward_dep),
        *,
        time_costs: TimeCosts | None = None,
    ) -> None:
        if durations is not None and time_costs is not None:
            raise ReneError("durations and time_costs are both given; give one of them")
        _refuse_lengths("durations", durations, num_stages)
        _refuse_lengths("time_costs", time_costs, num_stages)
        self.num_stages, self.num_micro_batches = num_stages, num_micro_batches
        self.scheduled = False
        rows = [list(schedule_type(num_stages, num_micro_batches, stage)) for stage in range(num_stages)]
        self._insts = [inst for row in rows for inst in row]
        _refuse_instructions(self._insts, num_stages)
        for inst in self._insts:
            if durations is not None:
                inst.duration = _value_for(durations, inst, "durations")[inst.stage_id]
            elif time_costs is not None:
                inst.options = _options(_value_for(time_costs, inst, "time_costs"), inst)
                inst.duration, inst.cost, inst.frequency = inst.options[0]
        self._inputs = self._dependencies(rows, dependency_rules)
        self.annotate_nodes()

    def _dependencies(
        self, rows: Sequence[Sequence[Instruction]], rules: Sequence[Rule]
    ) -> list[list[tuple[int, int]]]:
        """Return for each instruction those that it waits for, as `TaskGraph.of` takes them, with a delay of 0."""
        index = {inst: i for i, inst in enumerate(self._insts)}
        inputs: list[dict[int, int]] = [{} for _ in self._insts]
        for row in rows:
            for previous, inst in pairwise(row):
                inputs[index[inst]][index[previous]] = 0
        for i, j in _pairs(rules, self._insts):
            inputs[j][i] = 0
        return [[*delays.items()] for delays in inputs]

    @property
    def insts(self) -> Iterator[Instruction]:
        """All instructions, stage by stage in execution order."""
        yield from self._insts

    @property
    def total_execution_time(self) -> float:
        """The makespan, in the unit of the durations."""
        return max(self._earliest.ends_us, default=0) / self._scale

    def annotate_nodes(self) -> None:
        """Set the earliest and latest times of all instructions. Call it after a change of durations.

        Its time is linear in instructions and dependencies.
        """
        units, self._scale = in_whole_units([exact_duration(inst.duration, inst) for inst in self._insts])
        self._graph = TaskGraph.of(units, self._inputs)
        try:
            self._earliest = self._graph.earliest()
        except CycleError as error:
            names = [repr(self._insts[node]) for node in reversed(error.nodes)]
            raise ReneError(
                f"instructions wait for each other: {' -> '.join([*names, names[0]])}; one of the dependency rules "
                f"contradicts the others, or the order of a stage"
            ) from None
        times = self._earliest.starts_us, self._earliest.ends_us, self._graph.latest_ends(self._earliest)
        for inst, start, end, latest in zip(self._insts, *times, strict=True):
            inst.earliest_start, inst.earliest_finish = start / self._scale, end / self._scale
            inst.latest_start, inst.latest_finish = (latest - end + start) / self._scale, latest / self._scale
            inst.slack = (latest - end) / self._scale
        self.scheduled = False

    def schedule(self, algo: Literal["eager", "lazy"] = "eager") -> None:
        """Set the actual times of all instructions.

        Args:
            algo: "eager" starts each instruction as early as possible, "lazy" as late as possible.

        Raises:
            ReneError: If `algo` is another one.
        """
        if algo not in ("eager", "lazy"):
            raise ReneError(f"scheduling algorithm {algo!r} is unknown; use 'eager' or 'lazy'")
        for inst in self._insts:
            if algo == "eager":
                inst.actual_start, inst.actual_finish = inst.earliest_start, inst.earliest_finish
            else:
                inst.actual_start, inst.actual_finish = inst.latest_start, inst.latest_finish
        self.scheduled = True

    def get_critical_path(self) -> list[Instruction]:
        """Return a chain of instructions without gaps that is as long as the makespan."""
        path = self._graph.critical_path(self._earliest.starts_us, self._earliest.ends_us)
        return [self._insts[node] for node in path]

    def frontier(self, unit_time: float) -> list[energy.FrontierPoint]:
        """Return the time–cost frontier: the least cost for each total time, fastest first.

        Args:
            unit_time: The unit in which durations are counted, rounded up, such as 0.001.

        Raises:
            ReneError: If `unit_time` is not a positive number, or the DAG has no `time_costs`.
            RotaError: If the extra `energy` (lowtime) is not installed.
        """
        return energy.frontier(self._insts, self._inputs, unit_time)

    def assign(self, point: energy.FrontierPoint) -> None:
        """Give every instruction the duration, cost and frequency of a point; call `schedule` again after it."""
        for inst, option in zip(self._insts, point.options, strict=True):
            inst.duration, inst.cost, inst.frequency = option
        self.annotate_nodes()


# --- arguments --------------------------------------------------------------------------------------------------------


def _refuse_lengths(name: str, values_by_type: Durations | TimeCosts | None, num_stages: int) -> None:
    for kind, values in (values_by_type or {}).items():
        if len(values) != num_stages:
            raise ReneError(f"{name}[{kind.__name__}] is for {len(values)} stages, not for num_stages={num_stages}")


def _refuse_instructions(insts: Sequence[object], num_stages: int) -> None:
    """Raise ReneError unless the schedules yielded separate instructions of existing stages."""
    for inst in insts:
        if not isinstance(inst, Instruction):
            raise ReneError(f"the schedule yielded {inst!r}; let it yield instances of Instruction")
        if not 0 <= inst.stage_id < num_stages:
            raise ReneError(f"the schedule yielded {inst}, but stages are 0 to {num_stages - 1}")
    if len(set(insts)) != len(insts):
        raise ReneError("the schedule yielded the same instance twice; make an instance for each instruction")


def _value_for(values: Mapping[type[Instruction], Any], inst: Instruction, name: str) -> Any:
    if type(inst) not in values:
        raise ReneError(f"{name} has nothing for {type(inst).__name__}, which {inst} is; add it")
    return values[type(inst)]


def _options(by_stage: Mapping[int, Sequence[tuple[float, float, Any]]], inst: Instruction) -> tuple[Any, ...]:
    """Return the options of an instruction, slowest first."""
    options = by_stage.get(inst.stage_id)
    if not options:
        raise ReneError(f"time_costs has no (duration, cost, frequency) for {inst}; give one or more for its stage")
    return tuple(sorted(map(tuple, options), key=lambda option: option[:2], reverse=True))


# --- dependency rules -------------------------------------------------------------------------------------------------


def _pairs(rules: Sequence[Rule], insts: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """Yield (i, j) if a rule returns that `insts[j]` waits for `insts[i]`, of all pairs of its types."""
    for rule in rules:
        first, second = _types(rule)
        targets = [(j, inst) for j, inst in enumerate(insts) if isinstance(inst, second)]
        for i, source in enumerate(insts):
            if isinstance(source, first):
                for j, target in targets:
                    waits = rule(source, target)
                    if waits is True:
                        yield i, j
                    elif waits is not False:
                        raise ReneError(
                            f"dependency rule {_name(rule)} returned {waits!r} for {source} and {target}; "
                            f"return True or False"
                        )


def _types(rule: Rule) -> tuple[type[Instruction], type[Instruction]]:
    if not inspect.isfunction(rule):
        raise ReneError(f"dependency rule {rule!r} is not a function; write it as def rule(inst1: …, inst2: …) -> bool")
    names = list(inspect.signature(rule).parameters)
    if len(names) != 2:
        raise ReneError(f"dependency rule {_name(rule)} has {len(names)} arguments; it takes two instructions")
    try:
        hints = get_type_hints(rule)
    except (NameError, TypeError) as error:
        raise ReneError(f"the annotations of dependency rule {_name(rule)} cannot be read: {error}") from None
    for name in names:
        hint = hints.get(name)
        if hint is None:
            raise ReneError(f"argument {name} of dependency rule {_name(rule)} has no annotation; annotate its type")
        if not isinstance(hint, type) or not issubclass(hint, Instruction):
            raise ReneError(
                f"argument {name} of dependency rule {_name(rule)} is annotated {hint!r}; use Instruction or a "
                f"class derived from it, such as Forward"
            )
    return hints[names[0]], hints[names[1]]


def _name(rule: Rule) -> str:
    return getattr(rule, "__name__", repr(rule))
