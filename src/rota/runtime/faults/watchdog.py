"""Ends a rank that is stuck, and all others, with one message that says who waits for whom.

main thread  step: tick, tick, tick … (stuck in native code, cannot raise)
watchdog     …  no tick within the limit ──▶ roll call over the store ──▶ one report, exit code 70 on all

Between calls, the script may load data or evaluate by itself, so a longer limit holds there.
"""

from __future__ import annotations

import faulthandler
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Protocol, final

import torch.distributed as dist

from rota.core.errors import LostRankError, PipelineError, error_text, is_on_all_ranks
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.text import count_text
from rota.runtime import control
from rota.runtime.environment import TIMEOUT_S
from rota.runtime.faults.hang_report import (
    Doing,
    Status,
    compose_alone,
    frames_of,
    is_in_a_collective,
    place,
    printable,
    reason_of,
)
from rota.runtime.faults.roll_call import End, RollCall

EXIT_CODE = 70  # as sysexits.h: internal failure; `rota run` shows the message above it
_AFTER_A_FAILURE_S = 2.0  # by then, ranks that can notice by themselves that another one is gone have done so
_LAST_RESORT_S = 30.0  # after the limit, by which time all have reported
LONGEST_S = 10 * 365 * 86400.0  # instead of no limit
_FIRST_ERROR_S = 0.5  # for the rank with the first error to print it before others do
PATIENT = 10  # times the limit, while ranks load a model or write a checkpoint, each at its own pace, or work outside
_LEAST_S, _NUM_STEPS = 60.0, 20
_LEAST_IDLE_S = 1800.0  # as long as PyTorch lets ranks wait for each other

Describe = Callable[[list[FrameType]], Doing]


def limit_s(timeout_s: float | None, plan: Plan | None = None) -> float:
    """How long a rank may make no progress, in seconds. Raises PipelineError if `timeout_s` is not above 0.

    `timeout_s`: the script's limit; inf is no limit. None: that of `rota run --timeout`, else 20 simulated steps of the
    plan, if there is one yet, but at least a minute.
    """
    if timeout_s is None and TIMEOUT_S in os.environ:
        timeout_s = float(os.environ[TIMEOUT_S])
    if timeout_s is None:
        step_us = simulate(plan).makespan_us if plan is not None else 0
        return max(_LEAST_S, _NUM_STEPS * step_us / 1e6)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise PipelineError(
            f"timeout_s={timeout_s!r}; give seconds above 0, math.inf for no limit, or None for {_NUM_STEPS} times the "
            f"plan's simulated step"
        )
    return float(timeout_s)


class Run(Protocol):
    """What a watchdog asks a run, from a thread of its own."""

    is_queued: bool
    #: When `look` asked the device last: what it did, if it had not ended all that it was given, and how much it had
    #: ended by itself, which is progress too.
    on_device: Doing | None
    num_reached: int

    @property
    def at(self) -> object:
        """What it is at, which is progress if it changes."""

    def look(self) -> None:
        """Ask the device."""

    def last(self) -> str:
        """The last op that ended."""


@dataclass(slots=True)
class Watched:
    """One process's pipeline as its watchdog sees it.

    `names`: how reports call the processes. `run`: the last, or that which goes on, in `step`, which is counted from
    the beginning of the training. `num_calls`: that this process has begun and that all make together.
    """

    names: Sequence[str]
    run: Run | None = None
    step: int = 0
    num_calls: int = 0


@final
class Watchdog:
    """Watches one pipeline on one process. All processes make theirs in the same order; `close` ends its thread."""

    def __init__(self, timeout_s: float, watched: Watched | None = None) -> None:
        self._watched = watched or Watched([f"rank {process}" for process in range(dist.get_world_size())])
        self._timeout_s, self._times = timeout_s, 1
        #: How long this rank may be outside of the pipeline's calls.
        self._idle_limit_s = max(_LEAST_IDLE_S, PATIENT * timeout_s) if dist.get_world_size() > 1 else math.inf
        self._count = 0
        self._active = False
        self._thread_id: int | None = threading.get_ident()
        self._describe: Describe | None = None
        self._left = time.monotonic()  # when the last watched call ended
        self._still_s = 0.0
        self._silent = ""  # why the store is no longer asked: the process that holds it is stopped or gone
        self._fails = False  # this rank, with an error that the script gets
        self._is_wrong = False  # a rank has failed: the device, which may wait for it, is no longer asked
        self._ends = threading.Event()  # the process is about to be ended
        self._stop = threading.Event()
        control.report("opens")
        self._roll_call = RollCall()
        self._thread = threading.Thread(target=self._watch, name="rota-watchdog", daemon=True)
        _open.append(self)
        self._thread.start()

    def tick(self) -> None:
        """Record progress."""
        self._count += 1

    @contextmanager
    def watching(self, doing: str | Describe, times: int = 1) -> Iterator[None]:
        """Watch what ranks do together: it may go `times` × the limit without a `tick`.

        `doing` follows "waits for" in a report, or describes the call from the thread's stack. A LostRankError from
        inside gets the first error of all ranks. If the lost rank was ended by its watchdog, this one is ended alike.
        """
        before = self._describe, self._times, self._thread_id, self._active
        self._describe = (lambda frames: _in_a_collective(doing, frames)) if isinstance(doing, str) else doing
        self._times, self._thread_id = times, threading.get_ident()
        self._count += 1
        self._active = True
        try:
            yield
        except LostRankError as error:
            self._active, self._is_wrong = False, True
            self._explain(error)
            raise
        finally:
            self._describe, self._times, self._thread_id, self._active = before
            self._count += 1
            self._left = time.monotonic()
            if self._ends.is_set():
                # Other ranks are ending and caused this error. One message is enough, so wait here to be ended.
                threading.Event().wait()

    def report(self, error: BaseException | None) -> None:
        """Report to the others what ends this rank; those that wait for it end within seconds. None: no error does."""
        if error is None:
            words = f"{self.name} closed its pipeline without an error after {count_text(self._watched.step, 'step')}"
            with suppress(RuntimeError):
                self._roll_call.publish_end(End(words, self._watched.num_calls))
            return
        self._fails, self._is_wrong = True, len(self._watched.names) > 1 and not is_on_all_ranks(error)
        words, is_lost = error_text(error), isinstance(error, LostRankError)
        control.report("lost" if is_lost else "fails", "" if is_lost else words)
        with suppress(RuntimeError):
            self._roll_call.publish("lost" if is_lost else "failed", f"{self.name}: {words}")

    def close(self) -> None:
        """End the thread, and report to the supervisor that the pipeline closes."""
        control.report("closes")
        self._stop.set()
        self._thread.join(timeout=5)
        self._roll_call.close()
        if self in _open:
            _open.remove(self)
        run = self._watched.run
        if run is not None and run.is_queued and not (self._is_wrong or _open):
            faulthandler.cancel_dump_traceback_later()

    @property
    def _limit_s(self) -> float:
        return self._times * self._timeout_s

    @property
    def name(self) -> str:
        """What reports call this process."""
        return self._watched.names[self._roll_call.process]

    def last(self) -> str:
        """What this process did last."""
        run = self._watched.run
        return "before the first op" if run is None else f"{run.last()} in step {self._watched.step}"

    def _on_device(self) -> Doing | None:
        return None if self._watched.run is None or self._fails else self._watched.run.on_device

    def _explain(self, error: LostRankError) -> None:
        with suppress(RuntimeError):
            if self._roll_call.published("leaves") is not None:  # then the loss is no error of that rank's own
                self._end_after_failure(error.lost)
        with suppress(RuntimeError):
            error.first_error = self._roll_call.published("failed") or ""
            end = self._roll_call.end()
            if end is not None and end.num_calls < self._watched.num_calls:  # else it did its part of this call
                error.ended = end.words
        if error.first_error:
            time.sleep(_FIRST_ERROR_S)

    # --- on the thread --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        interval = min(self._timeout_s / 10, 1.0)
        before: object = None
        failed_s = 0.0
        while not self._stop.wait(interval):
            if self._answer(self._roll_call.is_called):
                self._end_all()
            is_still = self._is_at_work and self._still_s and self._times == 1
            if is_still and self._answer(lambda: self._roll_call.published("failed", "lost")):
                failed_s, self._is_wrong = failed_s + interval, True
            self._look()
            is_at_work = self._is_at_work
            is_idle = not any(watchdog._is_at_work for watchdog in [*_open])
            run = self._watched.run
            reached = None if run is None else (run.at, run.num_reached)
            num_ticks = sum(watchdog._count for watchdog in [*_open]) if is_idle else self._count
            state = is_at_work, num_ticks, reached
            if state != before or not (is_at_work or is_idle):  # another pipeline of this process is at work
                before, self._still_s, failed_s = state, 0.0, 0.0
            else:
                self._still_s += interval  # not by the clock: the machine may have been asleep
            if is_idle and self._still_s >= self._idle_limit_s and self._answer(self._is_awaited):
                self._end_all(self._idle_limit_s)
            if failed_s >= _AFTER_A_FAILURE_S:
                self._end_after_failure(self._status().words)
            if is_at_work and self._still_s >= self._limit_s:
                self._end_all()

    def _answer(self, ask: Callable[[], object]) -> object:
        """What the store answers; None once it does not."""
        if self._silent:
            return None
        try:
            return ask()
        except RuntimeError as error:
            self._silent = str(error).splitlines()[0]
            return None

    def _look(self) -> None:
        """Ask the device, unless a rank has failed. It may be stuck and keep the GIL: then only a timer can end this.

        Each look puts it off, by the limit of the pipeline of this process that has the least.
        """
        run = self._watched.run
        if run is not None and run.is_queued:
            limits = (
                other._limit_s if other._is_at_work or other._fails else other._idle_limit_s for other in [*_open]
            )
            limit_s = min(min(limits, default=math.inf) + _LAST_RESORT_S, LONGEST_S)
            faulthandler.dump_traceback_later(limit_s, exit=True, file=2)
            if not self._is_wrong:
                run.look()

    @property
    def _is_at_work(self) -> bool:
        """Whether this process is in a call of the pipeline, or its device is."""
        return self._active or self._on_device() is not None

    def _is_awaited(self) -> bool:
        """Whether no rank has ended its pipeline; else those left may work by themselves for as long as they like."""
        return not (self._roll_call.end() or self._roll_call.published("failed", "lost"))

    def _status(self) -> Status:
        frames = frames_of(self._thread_id)
        at = f" ({where})" if (where := place(frames)) else ""
        if not self._active and (doing := self._on_device()) is not None:
            return Status("waits" if doing.waits else "busy", doing.words + at, self._still_s, self.last())
        if not self._active or self._describe is None:
            outside_s = time.monotonic() - self._left
            return Status("outside", f"is outside of the pipeline's calls{at}", outside_s, self.last())
        waits, words = self._describe(frames)
        return Status("waits" if waits else "busy", words + ("" if waits else at), self._still_s, self.last())

    def _end_all(self, limit: float | None = None) -> None:
        if not _ending.acquire(blocking=False):  # another pipeline of this process does it
            self._stop.wait()
            return
        try:
            for watchdog in _open:
                watchdog._ends.set()
            watchdog = next((watchdog for watchdog in _open if watchdog._active), self)
            self._report_hang(watchdog._status(), self._limit_s if limit is None else limit)
        finally:
            os._exit(EXIT_CODE)

    def _report_hang(self, status: Status, limit: float) -> None:
        try:
            if self._silent:
                raise RuntimeError(self._silent)
            text, shows_it = self._roll_call.report(status, self._watched.names, limit)
        except RuntimeError as error:
            why = f"their store does not answer: {str(error).splitlines()[0]}"
            show(compose_alone(self.name, status, limit, why))
            return
        if shows_it or not control.is_connected():
            show(text)
        if shows_it:
            control.report("hangs", reason_of(text))  # the supervisor may kill this process from now on
        with suppress(RuntimeError):
            self._roll_call.leave_together()

    def _end_after_failure(self, words: str) -> None:
        """End this process. `words`: what it does, after its name."""
        if not _ending.acquire(blocking=False):  # another thread does it
            threading.Event().wait()
        try:
            failure = ""
            with suppress(RuntimeError):
                failure = self._roll_call.published("failed", "lost") or ""
                self._roll_call.publish("leaves", "")  # before it ends: those that lose it ask for that
            control.report("lost")
            show(f"rota: {self.name} {words}, and was ended because another rank failed: {failure}")
        finally:
            os._exit(EXIT_CODE)


_open: list[Watchdog] = []  # of this process
_ending = threading.Lock()


def _in_a_collective(doing: str, frames: list[FrameType]) -> Doing:
    waits = is_in_a_collective(frames)
    return Doing(waits, f"waits for {doing}" if waits else f"is busy while others wait for {doing}")


def show(text: str) -> None:
    """Write in one piece, without the lock of sys.stderr, and escaped, as part of it may come from the store."""
    os.write(2, f"{printable(text)}\n".encode())
