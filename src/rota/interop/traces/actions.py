"""The actions of a rank of PyTorch's pipeline engine, step by step, from the names in its trace.

    PP:1RECV_F0, PP:1F0, PP:1SEND_F0 …    schedules of several stages per rank, and those loaded from CSV
    Forward 0, Backward 0                 ScheduleGPipe; the stage is the rank
    forward_one_chunk, …                  Schedule1F1B, which names nothing: Python calls, if with_stack=True

A range may begin with a wait for the op's inputs, and end with sends. The op itself is from the first operator in it
that computes to the end of the last one; on an accelerator, from its first kernel to its last. Some ops compute
nothing, such as I of the first stage, whose input needs no gradient: they take no time once their input is there.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import NamedTuple

from rota.core.errors import FormatError
from rota.core.reading import short
from rota.core.tasks import Kind, Op
from rota.interop.traces.trace_files import Event, RankTrace

_NAME = re.compile(r"PP:(\d{1,6})([A-Z_]+)(\d{0,6})", re.ASCII)
_PAIR = re.compile(r"PP:\(([^()]*)\)OVERLAP_F_B")
_CHUNK = re.compile(r"(Forward|Backward) (\d{1,6})", re.ASCII)
_CALL = re.compile(r"pipelining/(?:stage|schedules)\.py\(\d+\): (\w+)$")
_CALLED = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
_COMMUNICATION = ("c10d::", "gloo:", "nccl:", "nccl", "record_param_comms")
_ALLOCATION = "aten::empty"  # of the buffer of a receive, in PyTorch 2.15 just before it
_RECEIVES = re.compile(r"gloo:recv|nccl:recv|ncclDevKernel_SendRecv.*|ncclKernel_SendRecv.*")
_NONE_NAMED = (
    "no action of PyTorch's pipeline engine is named in it: profile with ProfilerActivity.CPU, and a schedule of one "
    "stage per rank (Schedule1F1B names nothing) with with_stack=True"
)


class Ran(NamedTuple):
    """When an op ran, in ns of its rank's clock. `received_ns`: when its inputs had arrived, if the trace shows it."""

    start_ns: int
    end_ns: int
    received_ns: int | None


@dataclass(slots=True)
class Step:
    """One step of one rank: its ops, its stages' reductions and its optimizer step.

    `sent_ns`: when the send of ("F" or "B", stage, micro-batch) began, if it is named.
    """

    ops: dict[Op, Ran] = field(default_factory=dict)
    sent_ns: dict[tuple[str, int, int], int] = field(default_factory=dict)
    reductions: dict[int, tuple[int, int]] = field(default_factory=dict)
    optimizer: tuple[int, int] | None = None

    def moved(self, by_ns: int) -> Step:
        """The same step on a clock that is ahead by `by_ns`."""

        def pair(times: tuple[int, int]) -> tuple[int, int]:
            return times[0] + by_ns, times[1] + by_ns

        return Step(
            {op: Ran(*pair(ran[:2]), ran[2] and ran[2] + by_ns) for op, ran in self.ops.items()},
            {key: time + by_ns for key, time in self.sent_ns.items()},
            {stage: pair(times) for stage, times in self.reductions.items()},
            self.optimizer and pair(self.optimizer),
        )


class _Range(NamedTuple):
    """A named stretch of the host's time: an action `name` ("F", "SEND_F", "LOSS", …) of a stage."""

    start_ns: int
    end_ns: int
    stage: int
    name: str
    microbatch: int
    thread: tuple[str, str]


def steps_of(trace: RankTrace, position: int, is_last: bool) -> list[Step]:
    """The steps of a trace in order. `position` is the rank's place in the pipeline, its stage if no name has one.

    Raises FormatError if no action is named.
    """
    ranges = list(_named(trace)) or list(_chunks(trace, position)) or list(_calls(trace, position, is_last))
    if not any(action.name in Kind.__members__ for action in ranges):
        raise FormatError(f"{trace.path}: {_NONE_NAMED}")
    clock = _Clock(trace)
    steps = [step for ranges_of_step in _split(ranges) if (step := _step(ranges_of_step, clock)).ops]
    _add_optimizers(steps, trace.annotations)
    return steps


# --- names ------------------------------------------------------------------------------------------------------------


def _named(trace: RankTrace) -> Iterator[_Range]:
    for event in trace.annotations:
        if match := _NAME.fullmatch(event.name):
            stage, name, number = match.groups()
            yield _Range(event.start_ns, event.end_ns, int(stage), name, int(number or -1), event.thread)
        elif pair := _PAIR.fullmatch(event.name):
            ops = _ops(trace.path, pair[1])
            within = [op for op in trace.host_ops if event.start_ns <= op.start_ns and op.end_ns <= event.end_ns]
            backward = [op for op in within if op.name.startswith("autograd::")]
            if len(ops) != 2 or not backward:
                quoted = short(event.name)
                raise FormatError(f"{trace.path}: {quoted} holds no forward and backward that can be distinguished")
            middle = backward[0].start_ns
            for op, start, end in zip(ops, (event.start_ns, middle), (middle, event.end_ns), strict=True):
                yield _Range(start, end, op.stage, str(op.kind), op.microbatch, event.thread)


def _ops(path: str, pair: str) -> list[Op]:
    try:
        return [Op.parse(op) for op in pair.split(";")]
    except FormatError as error:
        raise FormatError(f"{path}: in PP:(…)OVERLAP_F_B: {error}") from None


def _chunks(trace: RankTrace, stage: int) -> Iterator[_Range]:
    for event in trace.annotations:
        if name := _CHUNK.fullmatch(event.name):
            yield _Range(event.start_ns, event.end_ns, stage, name[1][0], int(name[2]), event.thread)


def _calls(trace: RankTrace, stage: int, is_last: bool) -> Iterator[_Range]:
    """The k-th forward of a step is micro-batch k's, and so the k-th backward; a loss goes with its forward."""
    calls = [(call[1], event) for event in trace.python_calls if (call := _CALL.search(event.name))]
    counts: dict[str, int] = {}
    for name, event in calls:
        if name == "_step_microbatches":
            counts = {}
        elif name in _CALLED:
            counts[name] = counts.get(name, 0) + 1
            yield _Range(event.start_ns, event.end_ns, stage, _CALLED[name], counts[name] - 1, event.thread)
        elif name == "_maybe_compute_loss" and is_last:
            microbatch = counts.get("forward_one_chunk", 0) - 1
            yield _Range(event.start_ns, event.end_ns, stage, "LOSS", microbatch, event.thread)


def _split(ranges: list[_Range]) -> Iterator[list[_Range]]:
    """Divide actions into steps: an action that a step has already begins a new step."""
    step: list[_Range] = []
    keys: set[tuple[int, str, int]] = set()
    for action in sorted(ranges):
        key = action.stage, action.name, action.microbatch
        if key in keys:
            yield step
            step, keys = [], set()
        step.append(action)
        keys.add(key)
    yield step


# --- times ------------------------------------------------------------------------------------------------------------


class _Clock:
    """Looks up what happened within a range."""

    def __init__(self, trace: RankTrace) -> None:
        excluded = (*_COMMUNICATION, _ALLOCATION)
        self._computing = [event for event in trace.host_ops if not event.name.startswith(excluded)]
        self._by_thread: dict[tuple[str, str], list[Event]] = {}
        for event in self._computing:
            self._by_thread.setdefault(event.thread, []).append(event)
        self._kernels = trace.kernels
        self._has_kernels = any(not event.name.startswith(_COMMUNICATION) for _, event in trace.kernels)
        self._receives = [event for event in trace.annotations if _RECEIVES.fullmatch(event.name)]

    @property
    def shows_computing(self) -> bool:
        """Whether the trace has what ops compute, so that a range without any computes nothing."""
        return self._has_kernels or bool(self._computing)

    def computed(self, action: _Range) -> list[tuple[int, Event]]:
        """What a range computed, each with the time at which the host began or launched it."""
        if self._has_kernels:
            return [pair for pair in self._launched(*action[:2]) if not pair[1].name.startswith(_COMMUNICATION)]
        on_thread = self._by_thread.get(action.thread, [])
        # On an accelerator without kernels in the trace, another thread launches the backward.
        events = _starting(on_thread, *action[:2]) or _starting(self._computing, *action[:2])
        return [(event.start_ns, event) for event in events]

    def _launched(self, start_ns: int, end_ns: int) -> list[tuple[int, Event]]:
        first, last = (bisect_left(self._kernels, time, key=itemgetter(0)) for time in (start_ns, end_ns))
        return self._kernels[first:last]

    def received_ns(self, start_ns: int, end_ns: int) -> int | None:
        """When the receives that the host began in a stretch of time had ended."""
        receives = _starting(self._receives, start_ns, end_ns)
        if self._has_kernels:
            receives = [event for _, event in self._launched(start_ns, end_ns) if _RECEIVES.fullmatch(event.name)]
        return max((event.end_ns for event in receives), default=None)


def _starting(events: list[Event], start_ns: int, end_ns: int) -> list[Event]:
    first, last = (bisect_left(events, time, key=attrgetter("start_ns")) for time in (start_ns, end_ns))
    return events[first:last]


def _step(ranges: Sequence[_Range], clock: _Clock) -> Step:
    step, free_ns, host_free_ns = Step(), 0, 0
    receives = {
        (action.name[-1], action.stage, action.microbatch): action[:2]
        for action in ranges
        if action.name.startswith("RECV_")
    }
    for action in ranges:
        if action.name.startswith("SEND_"):
            step.sent_ns[action.name[-1], action.stage, action.microbatch] = action.start_ns
        elif action.name == "REDUCE_GRAD":
            step.reductions[action.stage] = action[:2]
        elif action.name == "LOSS":
            op = Op(action.stage, Kind.F, action.microbatch)
            if op in step.ops:
                free_ns = max((event.end_ns for _, event in clock.computed(action)), default=step.ops[op].end_ns)
                step.ops[op] = step.ops[op]._replace(end_ns=free_ns)
        elif action.name in Kind.__members__:
            computed = clock.computed(action)
            way = "F" if action.name == "F" else "B"
            before = host_free_ns, computed[0][0] if computed else action.end_ns
            posted = receives.get((way, action.stage, action.microbatch), (0, 0)) if receives else before
            received = None if action.name == "W" else clock.received_ns(*posted)
            start, free_ns = _ran(action, [event for _, event in computed], received, free_ns, clock.shows_computing)
            step.ops[Op(action.stage, Kind(action.name), action.microbatch)] = Ran(start, free_ns, received)
            host_free_ns = action.end_ns
    return step


def _ran(
    action: _Range, computed: list[Event], received_ns: int | None, free_ns: int, shows_computing: bool
) -> tuple[int, int]:
    """When an op ran. It waited for its receive, and for the rank, which its op before kept busy until `free_ns`."""
    if computed:
        start, end = min(event.start_ns for event in computed), max(event.end_ns for event in computed)
    elif shows_computing:
        start = end = max(action.end_ns, free_ns, received_ns or 0)  # a host does not wait for its accelerator
    else:
        start, end = action[:2]
    return max(start, min(received_ns or start, end)), end


def _add_optimizers(steps: Sequence[Step], annotations: Iterable[Event]) -> None:
    """Add to each step its optimizer's work between the step's last op and the next step's first."""
    firsts = [min(ran.start_ns for ran in step.ops.values()) for step in steps]
    for event in annotations:
        i = bisect_right(firsts, event.start_ns) - 1
        if i < 0 or not event.name.startswith("Optimizer.step#"):
            continue
        if max(ran.end_ns for ran in steps[i].ops.values()) <= event.start_ns:
            start, end = steps[i].optimizer or (event.start_ns, event.end_ns)
            steps[i].optimizer = min(start, event.start_ns), max(end, event.end_ns)
