"""Why a run makes no progress, in one message: who waits for whom, since when, and which rank never arrived."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Literal, NamedTuple, TypeVar

import msgspec

from rota.core import reading
from rota.core.text import count_text

Report = TypeVar("Report")


def decoded(text: str, into: type[Report]) -> Report | None:
    """A report in a text, None if it is malformed: anyone who reaches torchrun's store can write there."""
    try:
        return msgspec.json.decode(text, type=into)
    except (msgspec.DecodeError, RecursionError):
        return None


class Status(NamedTuple):
    """A process's report to the others: what it does, in `words` that follow its name, since when, and its `last` op.

    `kind`: it "waits" for others, is "busy" itself, or is "outside" of the pipeline's calls.
    """

    kind: Literal["waits", "busy", "outside"]
    words: str
    duration_s: float
    last: str

    def to_words(self) -> str:
        """The status as words that follow the process's name."""
        return f"{self.words} for {self.duration_s:.1f} s, {self.last}"


def compose(names: Sequence[str], statuses: Mapping[int, Status], limit_s: float, answer_s: float) -> str:
    """The message for all processes, which have these `names`; one without an entry in `statuses` did not answer."""
    lines = [f"rota: no progress for {limit_s:g} s{_SO}{_reason(names, statuses)}"]
    for process, name in enumerate(names):
        status = statuses.get(process)
        lines.append(f"    {name} {status.to_words() if status else f'did not answer within {answer_s:g} s'}")
    remedy = "if it only needs more time, give Pipeline a larger timeout_s"
    if _all_outside(statuses):
        remedy = f"if they only need more time, give Pipeline a larger timeout_s: {_OUTSIDE}"
    lines.append(f"    {remedy}")
    return "\n".join(lines)


def reason_of(report: str) -> str:
    """Whom the others wait for, from a message of `compose`."""
    return printable(report.partition("\n")[0].partition(_SO)[2])


def printable(text: str) -> str:
    """The text with control characters escaped, except line breaks, so that it cannot control a terminal."""
    return "\n".join(map(reading.printable, text.split("\n")))


def compose_alone(name: str, status: Status, limit_s: float, why: str) -> str:
    """The message of a process that cannot ask the others."""
    return (
        f"rota: no progress for {limit_s:g} s, and the other ranks could not be asked ({why}): {name} "
        f"{status.to_words()}; if it only needs more time, give Pipeline a larger timeout_s"
    )


def _reason(names: Sequence[str], statuses: Mapping[int, Status]) -> str:
    """Whom the others wait for; processes that did not answer come first, as they are the most certain cause."""
    silent = [name for process, name in enumerate(names) if process not in statuses]
    if silent:
        be, it = ("is", "it") if len(silent) == 1 else ("are", "they")
        return f"{_listed(silent)} never answered; {it} {be} stopped, dead, or without a pipeline"
    outside, busy = ([names[p] for p in sorted(statuses) if statuses[p].kind == kind] for kind in ("outside", "busy"))
    if _all_outside(statuses):
        return "all ranks are outside of the pipeline's calls"
    if outside:
        return f"{_listed(outside)} never reached what the others wait for"
    if busy:
        return f"{_listed(busy)} {'makes' if len(busy) == 1 else 'make'} no progress"
    return "all wait for each other; check that all make the same calls in the same order"


def _all_outside(statuses: Mapping[int, Status]) -> bool:
    return all(status.kind == "outside" for status in statuses.values())


_OUTSIDE = "ranks may be outside of its calls for ten times as long, and for half an hour at least"
_SO = ", so all ranks end: "
_MOST_NAMES = 8


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {count_text(more, 'other')}" if more > 0 else "")


# --- where a thread is ------------------------------------------------------------------------------------------------


_NOT_THE_USERS = {"torch", "rota", "contextlib", *sys.stdlib_module_names}


class Doing(NamedTuple):
    """What a rank does, in words that follow its name; `waits`: whether it waits for another rank, or is busy."""

    waits: bool
    words: str


def frames_of(thread: int | None) -> list[FrameType]:
    """The thread's calls, innermost first; none if it has ended."""
    innermost = sys._current_frames().get(thread) if thread is not None else None
    return [] if innermost is None else [frame for frame, _ in traceback.walk_stack(innermost)]


def is_in_a_collective(frames: list[FrameType]) -> bool:
    """Whether the thread is in native code that talks to other processes, rather than in a stage or on the disk."""
    inner = _module(frames[0]) if frames else ""
    is_torchs = inner.startswith("torch.distributed") and not inner.startswith("torch.distributed.checkpoint")
    return is_torchs or inner.startswith("rota.runtime")


def place(frames: list[FrameType]) -> str:
    """The innermost line that is neither PyTorch's, Python's nor ours, such as "train.py:12 in forward"."""
    for frame in frames:
        if _module(frame).partition(".")[0] not in _NOT_THE_USERS:
            code = frame.f_code
            return f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} in {code.co_name}"
    return ""


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
