"""Traces of all ranks of a pipeline -> a measured Timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from statistics import median, median_low
from typing import NamedTuple

from rota.core.cluster import Cluster, Link
from rota.core.costs import Costs
from rota.core.errors import FormatError
from rota.core.placing import place
from rota.core.plan import Plan
from rota.core.reading import LARGEST
from rota.core.tasks import Kind, Op, StepEnd
from rota.core.text import count_text
from rota.core.timeline import Timeline
from rota.interop.traces.actions import Ran, Step, steps_of
from rota.interop.traces.trace_files import RankTrace, read_trace

_ONE_CLOCK_NS = 10**9  # processes of one machine do not differ by this much


@dataclass(frozen=True, slots=True)
class ImportedTrace:
    """A measured timeline, and how it was made.

    The timeline is that of `step`, of `num_steps` in the traces. `clock_shifts_us`: by how much each rank's clock was
    moved ahead, so that no message arrives before it is sent. `hosts`: the machine of each rank, "" if unknown.
    `world_size`: the number of processes of the run, if known. `on_cpu`: whether nothing ran on an accelerator.
    """

    timeline: Timeline
    step: int
    num_steps: int
    clock_shifts_us: tuple[int, ...]
    hosts: tuple[str, ...]
    world_size: int
    on_cpu: bool

    def to_text(self) -> str:
        """A summary in a few lines."""
        plan = self.timeline.plan
        lines = [
            f"step {self.step} of {self.num_steps} (counted from 0): {count_text(plan.num_ranks, 'rank')}, "
            f"{count_text(plan.num_stages, 'stage')}, {count_text(plan.num_microbatches, 'micro-batch', 'es')}"
        ]
        moved = [f"rank {rank} by {us:,} µs" for rank, us in enumerate(self.clock_shifts_us) if us]
        machines = count_text(len(set(self.hosts) - {""}), "machine") if all(self.hosts) else "machines unknown"
        if moved:
            lines.append(f"clocks moved ahead, as messages arrived before they were sent: {', '.join(moved)}")
        else:
            lines.append(f"clocks as recorded ({machines}): no message arrives before it is sent")
        if self.world_size > plan.num_ranks:
            lines.append(
                f"of {self.world_size} processes, {plan.num_ranks} gave traces: what they waited for elsewhere is "
                f"unknown; unless the others are replicas, give their traces too"
            )
        on_one_machine = self.on_cpu and len(self.hosts) > 1 and all(self.hosts) and len({*self.hosts}) == 1
        if on_one_machine and self.timeline.num_cores is None:
            lines.append(
                f"cores unknown: all ranks ran on the CPUs of one machine; if it has fewer than {plan.num_ranks} "
                f"cores, waits for a core show as slower ops: give its number of cores as --cores N"
            )
        return "\n".join(lines)


def import_traces(paths: Sequence[str], step: int | None = None, num_cores: int | None = None) -> ImportedTrace:
    """Read torch.profiler traces of a run on PyTorch's pipeline engine.

    The plan is rebuilt from the ops that ran; its costs are the medians of the measured times, without memory.

    Args:
        paths: One trace per rank, .json or .json.gz. Ranks are ordered by the traces' ranks, else as the paths are.
        step: Which of the profiled steps, from 0; None: the last.
        num_cores: CPU cores that all ranks shared, written into the timeline; None: unknown, traces do not record it.

    Returns:
        The measured timeline, and how it was made.

    Raises:
        FormatError: Traces cannot be read, or contradict each other.
        PlanError: The ops that ran are not a correct plan.
    """
    traces = _in_order([read_trace(path) for path in paths])
    by_rank = [steps_of(trace, rank, rank == len(traces) - 1) for rank, trace in enumerate(traces)]
    counts = {len(steps) for steps in by_rank}
    if len(counts) > 1:
        numbers = ", ".join(f"{trace.path} {len(steps)}" for trace, steps in zip(traces, by_rank, strict=True))
        raise FormatError(
            f"the traces have different numbers of steps ({numbers}); profile the same steps on every rank"
        )
    (num_steps,) = counts
    chosen = num_steps - 1 if step is None else step
    if not 0 <= chosen < num_steps:
        raise FormatError(f"step {chosen} is not in the traces, which have the steps 0 to {num_steps - 1}")
    steps = _with_one_backward([steps[chosen] for steps in by_rank])
    plan = _plan(steps)
    messages = list(_messages(plan))
    shifts = _shifts_ns(_earliest(messages, steps), len(steps))
    _refuse_two_runs(traces, shifts)
    steps = [step.moved(shift) for step, shift in zip(steps, shifts, strict=True)]
    timeline = replace(_timeline(plan, messages, steps), num_cores=num_cores)
    _refuse_disorder(timeline, traces)
    moved_us, hosts = tuple(ns // 1000 for ns in shifts), tuple(trace.host for trace in traces)
    world_size = max(trace.world_size for trace in traces)
    on_cpu = not any(trace.kernels for trace in traces)
    return ImportedTrace(timeline, chosen, num_steps, moved_us, hosts, world_size, on_cpu)


def _refuse_disorder(timeline: Timeline, traces: Sequence[RankTrace]) -> None:
    """Refuse times that no pipeline can have, such as two ops of a rank at once."""
    try:
        timeline.refuse_disorder()
        if timeline.makespan_us > LARGEST:
            raise FormatError(f"the step takes {timeline.makespan_us} µs; expected {LARGEST} or less")
    except FormatError as error:
        raise FormatError(f"{traces[0].path} and those of the other ranks give no run of a pipeline: {error}") from None


def _in_order(traces: list[RankTrace]) -> list[RankTrace]:
    if not traces:
        raise FormatError("no traces: give one per rank of the pipeline")
    if any(trace.rank is None for trace in traces):
        return traces
    traces = sorted(traces, key=lambda trace: trace.rank or 0)
    for a, b in pairwise(traces):
        if a.rank == b.rank:
            raise FormatError(f"{a.path} and {b.path} are both of rank {a.rank}; give one trace per rank")
    return traces


def _refuse_two_runs(traces: Sequence[RankTrace], shifts_ns: Sequence[int]) -> None:
    """One machine has one clock."""
    clocks: dict[str, list[tuple[int, str]]] = {}
    for trace, shift in zip(traces, shifts_ns, strict=True):
        clocks.setdefault(trace.host, []).append((shift, trace.path))
    for host, shifts in clocks.items():
        (least, a), (most, b) = min(shifts), max(shifts)
        if host and most - least > _ONE_CLOCK_NS:
            raise FormatError(
                f"{a} and {b} are both of machine {host}, but by their messages {(most - least) / 1e9:,.1f} s apart: "
                f"give traces of one run"
            )


def _with_one_backward(steps: list[Step]) -> list[Step]:
    """If any backward is split into I and W, each whole one as I and W of half its time, as a plan requires."""
    if not any(op.kind is Kind.W for step in steps for op in step.ops):
        return steps
    for step in steps:
        for op in [op for op in step.ops if op.kind is Kind.B]:
            start, end, received = step.ops.pop(op)
            middle = (start + end) // 2
            step.ops[op._replace(kind=Kind.I)] = Ran(start, middle, received)
            step.ops[op._replace(kind=Kind.W)] = Ran(middle, end, None)
    return steps


# --- the plan ---------------------------------------------------------------------------------------------------------


def _plan(steps: Sequence[Step]) -> Plan:
    """The plan of the ops in the order in which they ran, on a chain of stages with the median times."""
    ranks: dict[int, int] = {}
    times: dict[tuple[int, Kind], list[int]] = {}
    for rank, step in enumerate(steps):
        for op, (start, end, _) in step.ops.items():
            if ranks.setdefault(op.stage, rank) != rank:
                raise FormatError(
                    f"stage {op.stage} ran on ranks {ranks[op.stage]} and {rank}; give one pipeline's traces"
                )
            times.setdefault((op.stage, op.kind), []).append((end - start + 500) // 1000)
    for stage in range(max(ranks) + 1):
        if stage not in ranks:
            raise FormatError(f"no trace runs stage {stage}, but one runs stage {max(ranks)}; give those of all ranks")

    def median_us(kind: Kind) -> tuple[int, ...]:
        return tuple(round(median(times.get((stage, kind), [0]))) for stage in range(len(ranks)))

    kinds = {kind for _, kind in times}
    back = Kind.I if Kind.W in kinds else Kind.B
    costs = Costs(median_us(Kind.F), median_us(back), median_us(Kind.W) if Kind.W in kinds else None)
    placement = place(costs, Cluster.uniform(len(steps)), [ranks[stage] for stage in range(len(ranks))])
    placement = placement if kinds - {Kind.F} else placement.forward_only()
    placement = replace(placement, step_ends=tuple(_step_ends(steps)))
    orders = tuple(tuple(sorted(step.ops, key=lambda op: step.ops[op][:2])) for step in steps)
    return Plan(placement, 1 + max(op.microbatch for order in orders for op in order), orders)


def _step_ends(steps: Sequence[Step]) -> Iterator[StepEnd]:
    """Assign a rank's optimizer step to the stage whose last op ends last."""
    for step in steps:
        last = {op.stage: ran.end_ns for op, ran in sorted(step.ops.items(), key=lambda item: item[1].end_ns)}
        for stage in last:
            reduction = step.reductions.get(stage, (0, 0))
            optimizer = step.optimizer if step.optimizer and stage == [*last][-1] else (0, 0)
            times = [(end - start + 500) // 1000 for start, end in (reduction, optimizer)]
            if any(times):
                yield StepEnd(stage, *times)


# --- the timeline -----------------------------------------------------------------------------------------------------


class _Message(NamedTuple):
    route: int
    sender: int
    receiver: int
    source: Op
    target: Op


def _messages(plan: Plan) -> Iterator[_Message]:
    """The messages, route by route, micro-batch by micro-batch. Raises PlanError if ops are missing."""
    assert plan.nodes
    for i, route in enumerate(plan.placement.routes):
        a, b = plan.placement.tasks[route.source], plan.placement.tasks[route.target]
        for m in range(plan.num_microbatches):
            yield _Message(i, route.sender, route.receiver, Op(a.stage, a.kind, m), Op(b.stage, b.kind, m))


class _Early(NamedTuple):
    """By how much a message was read before it was made, by the clocks of its two ranks; negative: after."""

    by_ns: int
    source: Op
    target: Op


def _earliest(messages: Iterable[_Message], steps: Sequence[Step]) -> dict[tuple[int, int], _Early]:
    """For each pair of ranks the message that was read the longest time before it was made, by their own clocks."""
    earliest: dict[tuple[int, int], _Early] = {}
    for _, sender, receiver, source, target in messages:
        early = _Early(steps[sender].ops[source].end_ns - steps[receiver].ops[target].start_ns, source, target)
        earliest[sender, receiver] = max(early, earliest.get((sender, receiver), early), key=attrgetter("by_ns"))
    return earliest


def _shifts_ns(earliest: Mapping[tuple[int, int], _Early], num_ranks: int) -> list[int]:
    """How far each rank's clock must be moved ahead, so that no message arrives before it was sent.

    `earliest[sender, receiver]` says how far the receiver's clock is behind the sender's, or more. Ranks of one machine
    share a clock, and clocks that a time server sets differ by little, so times that contradict no message are left as
    recorded. Raises FormatError if no shifts are enough: the traces are not of one run.
    """
    shifts = [0] * num_ranks
    for _ in range(num_ranks):
        moved = None
        for (sender, receiver), early in earliest.items():
            if shifts[sender] + early.by_ns > shifts[receiver]:
                shifts[receiver] = shifts[sender] + early.by_ns
                moved = sender, receiver
        if moved is None:
            return shifts
    assert moved is not None
    (sender, receiver), (_, source, target) = moved, earliest[moved]
    raise FormatError(
        f"the traces contradict each other: however the clocks are moved, a message arrives before it was sent, such "
        f"as from {source} on rank {sender} to {target} on rank {receiver}; give traces of the same steps of one run"
    )


def _flights(messages: Sequence[_Message], steps: Sequence[Step]) -> list[tuple[int, int]]:
    """When each message was sent and when it arrived, between its source's end and its reader's start.

    Where a trace does not show an arrival, it is as fast as the fastest message of its two ranks.
    """
    measured: list[tuple[int, int | None]] = []
    fastest: dict[tuple[int, int], int] = {}
    for _, sender, receiver, source, target in messages:
        produced, read = steps[sender].ops[source].end_ns, steps[receiver].ops[target]
        key = ("F" if source.kind is Kind.F else "B", source.stage, source.microbatch)
        sent = min(max(produced, steps[sender].sent_ns.get(key, produced)), read.start_ns)
        arrived = None if read.received_ns is None else min(max(sent, read.received_ns), read.start_ns)
        took = (read.start_ns if arrived is None else arrived) - sent
        fastest[sender, receiver] = min(took, fastest.get((sender, receiver), took))
        measured.append((sent, arrived))
    flights = []
    for (sent, arrived), (_, sender, receiver, _, target) in zip(measured, messages, strict=True):
        guess = min(sent + fastest[sender, receiver], steps[receiver].ops[target].start_ns)
        flights.append((sent, guess if arrived is None else arrived))
    return flights


def _timeline(plan: Plan, messages: Sequence[_Message], steps: Sequence[Step]) -> Timeline:
    """The timeline of steps on one clock, from the first op's start; links have their messages' median times."""
    origin = min(ran.start_ns for step in steps for ran in step.ops.values())

    def us(time_ns: int) -> int:
        return (time_ns - origin + 500) // 1000

    flights = _flights(messages, steps)
    took: dict[tuple[int, int], list[int]] = {}
    columns: list[list[tuple[int, int]]] = [[] for _ in plan.placement.routes]
    for message, (sent, arrived) in zip(messages, flights, strict=True):
        columns[message.route].append((us(sent), us(arrived)))
        took.setdefault((message.sender, message.receiver), []).append(us(arrived) - us(sent))
    links = tuple((a, b, Link(median_low(times_us))) for (a, b), times_us in sorted(took.items()))
    cluster = replace(plan.placement.cluster, links=links)
    return Timeline(
        replace(plan, placement=replace(plan.placement, cluster=cluster)),
        tuple(tuple(us(step.ops[op].start_ns) for op in order) for order, step in zip(plan.orders, steps, strict=True)),
        tuple(tuple(us(step.ops[op].end_ns) for op in order) for order, step in zip(plan.orders, steps, strict=True)),
        tuple(tuple(sent for sent, _ in column) for column in columns),
        tuple(tuple(arrived for _, arrived in column) for column in columns),
        tuple(_step_end_times(plan, steps, us)),
    )


def _step_end_times(plan: Plan, steps: Sequence[Step], us: Callable[[int], int]) -> Iterator[tuple[int, int, int, int]]:
    for i, rank in plan.step_end_ranks:
        end, step = plan.placement.step_ends[i], steps[rank]
        last = max(ran.end_ns for op, ran in step.ops.items() if op.stage == end.stage)
        reduction = step.reductions.get(end.stage, (last, last)) if end.reduce_us else (last, last)
        optimizer = step.optimizer if step.optimizer and end.optimizer_us else (reduction[1], reduction[1])
        yield us(reduction[0]), us(reduction[1]), us(optimizer[0]), us(optimizer[1])
