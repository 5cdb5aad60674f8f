"""`ReneDAG`: all instructions, what waits for what, and when each may run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, final

from rota.compat.rene.exact import as_written, in_whole_parts
from rota.compat.rene.instruction import Instruction, ReneError
from rota.compat.rene.rules import Rule, backward_dep, dependencies, forward_dep
from rota.taskgraph import CycleError, Earliest, TaskGraph

if TYPE_CHECKING:
    from rota.compat.rene.energy import FrontierPoint

Schedule = Callable[[int, int, int], Iterable[Instruction]]
Durations = Mapping[type[Instruction], Sequence[float]]
TimeCosts = Mapping[type[Instruction], Mapping[int, Sequence[tuple[float, float, Any]]]]


@final
class ReneDAG:
    """The instructions of all stages; each stage does its own one after the other.

    `schedule_type(num_stages, num_micro_batches, stage_id)` yields them: a `PipelineSchedule`, or any such callable.
    `durations`: {Forward: [of stage 0, of stage 1, …], …}; None where instructions come with their own. Or, instead of
    them, `time_costs`: {Forward: {stage: [(duration, cost, frequency), …]}, …}, of which the slowest is taken first.
    `dependency_rules` are tried on every pair of instructions that their annotations fit. Raises ReneError.
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
                inst.duration = _of(durations, inst, "durations")[inst.stage_id]
            elif time_costs is not None:
                inst.options = _options(_of(time_costs, inst, "time_costs"), inst)
                inst.duration, inst.cost, inst.frequency = inst.options[0]
        self._waits = self._waits_of(rows, dependency_rules)
        self.annotate_nodes()

    def _waits_of(self, rows: Sequence[Sequence[Instruction]], rules: Sequence[Rule]) -> list[list[tuple[int, int]]]:
        waits: list[dict[int, None]] = [{} for _ in self._insts]
        place = {inst: i for i, inst in enumerate(self._insts)}
        for row in rows:
            for before, inst in pairwise(row):
                waits[place[inst]][place[before]] = None
        for i, j in dependencies(rules, self._insts):
            waits[j][i] = None
        return [[(before, 0) for before in others] for others in waits]

    @property
    def insts(self) -> Iterator[Instruction]:
        """Stage by stage, in order."""
        yield from self._insts

    @property
    def total_execution_time(self) -> float:
        return max(self._earliest.ends_us, default=0) / self._scale

    def annotate_nodes(self) -> None:
        """When each may start and finish; again after durations were changed. Linear in instructions and waits."""
        parts, self._scale = in_whole_parts([as_written(inst.duration, inst) for inst in self._insts])
        graph = TaskGraph(parts, self._waits)
        try:
            self._earliest: Earliest = graph.earliest()
        except CycleError as error:
            names = [repr(self._insts[node]) for node in reversed(error.nodes)]
            raise ReneError(
                f"instructions wait for each other: {' -> '.join([*names, names[0]])}; one of the dependency rules "
                f"contradicts the others, or the order of a stage"
            ) from None
        self._latest_ends = graph.latest_ends(self._earliest)
        for i, inst in enumerate(self._insts):
            start, end, latest = self._earliest.starts_us[i], self._earliest.ends_us[i], self._latest_ends[i]
            inst.earliest_start, inst.earliest_finish = start / self._scale, end / self._scale
            inst.latest_start, inst.latest_finish = (latest - end + start) / self._scale, latest / self._scale
            inst.slack = (latest - end) / self._scale
        self.scheduled = False

    def schedule(self, algo: Literal["eager", "lazy"] = "eager") -> None:
        """Everything as early as it may be, or as late."""
        if algo not in ("eager", "lazy"):
            raise ReneError(f"scheduling algorithm {algo!r} is unknown; use 'eager' or 'lazy'")
        for inst in self._insts:
            times = (inst.earliest_start, inst.earliest_finish)
            inst.actual_start, inst.actual_finish = (
                times if algo == "eager" else (inst.latest_start, inst.latest_finish)
            )
        self.scheduled = True

    def get_critical_path(self) -> list[Instruction]:
        """Instructions one after the other without a gap, as long as the whole; of several, with least stage changes.

        Linear in instructions and waits.
        """
        ends, starts = self._earliest.ends_us, self._earliest.starts_us
        changes: dict[int, int] = {}  # of the best path to a critical instruction
        before: dict[int, int | None] = {}
        for node in self._earliest.sequence:
            if self._latest_ends[node] > ends[node]:
                continue
            changes[node], before[node] = 0, None
            stage = self._insts[node].stage_id
            ways = [
                (changes[other] + abs(stage - self._insts[other].stage_id), other)
                for other, _ in self._waits[node]
                if other in changes and ends[other] == starts[node]
            ]
            if ways:
                changes[node], before[node] = min(ways)
        makespan = max(ends, default=0)
        last = min((node for node in changes if ends[node] == makespan), key=changes.__getitem__, default=None)
        path = []
        while last is not None:
            path.append(self._insts[last])
            last = before[last]
        return path[::-1]

    def frontier(self, unit_time: float) -> list[FrontierPoint]:
        """What less time costs, and less cost takes, fastest first; durations are counted in `unit_time`.

        Needs `time_costs` and the extra `energy` (lowtime).
        """
        from rota.compat.rene.energy import frontier

        return frontier(self._insts, self._waits, unit_time)

    def assign(self, point: FrontierPoint) -> None:
        """Every instruction as the point has it; `schedule` again after it."""
        for inst, option in zip(self._insts, point.options, strict=True):
            inst.duration, inst.cost, inst.frequency = option
        self.annotate_nodes()


def _refuse_lengths(name: str, given: Durations | TimeCosts | None, num_stages: int) -> None:
    for kind, values in (given or {}).items():
        if len(values) != num_stages:
            raise ReneError(f"{name}[{kind.__name__}] is for {len(values)} stages, not for num_stages={num_stages}")


def _refuse_instructions(insts: Sequence[object], num_stages: int) -> None:
    for inst in insts:
        if not isinstance(inst, Instruction):
            raise ReneError(f"the schedule yielded {inst!r}; let it yield instances of Instruction")
        if not 0 <= inst.stage_id < num_stages:
            raise ReneError(f"the schedule yielded {inst}, but stages are 0 to {num_stages - 1}")
    if len(set(insts)) != len(insts):
        raise ReneError("the schedule yielded the same instance twice; make an instance for each instruction")


def _of(values: Mapping[type[Instruction], Any], inst: Instruction, name: str) -> Any:
    if type(inst) not in values:
        raise ReneError(f"{name} has nothing for {type(inst).__name__}, which {inst} is; add it")
    return values[type(inst)]


def _options(by_stage: Mapping[int, Sequence[tuple[float, float, Any]]], inst: Instruction) -> tuple[Any, ...]:
    """Slowest first."""
    options = by_stage.get(inst.stage_id)
    if not options:
        raise ReneError(f"time_costs has no (duration, cost, frequency) for {inst}; give one or more for its stage")
    return tuple(sorted(map(tuple, options), key=lambda option: option[:2], reverse=True))
