"""Ends a rank that is stuck, together with all others, in one message that says who waits for whom.

main thread  step: tick, tick, tick … (stuck in native code, cannot raise)
watchdog     …  the count stands still for the limit ──▶ roll call over the store ──▶ one report, exit code 70 on all
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import final

import torch.distributed as dist

from rota.errors import LostRankError, PipelineError
from rota.plan import Plan
from rota.runtime import control
from rota.runtime.faults.hang_report import Standing, alone, printable, reason_of
from rota.runtime.faults.roll_call import RollCall
from rota.runtime.faults.stack_location import Doing, frames_of, is_in_a_collective, place
from rota.runtime.launcher_files import given_limit_s
from rota.simulation import simulate

EXIT_CODE = 70  # as sysexits.h: internal failure; `rota run` shows the message above it
_AFTER_A_FAILURE_S = 2.0  # by then a rank that can notice by itself that another one is gone has done so
_FIRST_ERROR_S = 0.5  # for the rank with the first error to show it before others do
PATIENT = 10  # times the limit, where ranks load a model or write a checkpoint, each at its own pace
_LEAST_S, _NUM_STEPS = 60.0, 20

Describe = Callable[[list[FrameType]], Doing]


def limit_s(timeout_s: float | None, plan: Plan | None = None) -> float:
    """How long a rank may make no progress, in seconds.

    Args:
        timeout_s: what the script gives; inf is no limit. None: what `rota run --timeout` was given, else 20 simulated
            steps, and a minute at least.
        plan: whose steps; None where there is none yet.

    Raises:
        PipelineError: `timeout_s` is not above 0.
    """
    if timeout_s is None:
        timeout_s = given_limit_s()
    if timeout_s is None:
        step_us = simulate(plan).makespan_us if plan is not None else 0
        return max(_LEAST_S, _NUM_STEPS * step_us / 1e6)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise PipelineError(
            f"timeout_s={timeout_s!r}; give seconds above 0, math.inf for no limit, or None for {_NUM_STEPS} times the "
            f"plan's simulated step"
        )
    return float(timeout_s)


@final
class Watchdog:
    """Of one pipeline on one process. Made by all processes, in the same order; `close` ends its thread.

    `names`: of all processes, for people. `last` returns what this process did last.
    """

    def __init__(self, timeout_s: float) -> None:
        self.names: Sequence[str] = [f"rank {process}" for process in range(dist.get_world_size())]
        self.last: Callable[[], str] = lambda: "before the first op"
        self._timeout_s, self._times = timeout_s, 1
        self._count = 0
        self._active = False
        self._thread_id: int | None = threading.get_ident()
        self._describe: Describe | None = None
        self._left = time.monotonic()  # what was watched last
        self._still_s = 0.0
        self._silent = ""  # why the store was given up: who holds it is stopped, or gone for good
        self._ends = threading.Event()  # the process is about to be ended
        self._stop = threading.Event()
        control.report("opens")
        self._roll_call = RollCall()
        self._thread = threading.Thread(target=self._watch, name="rota-watchdog", daemon=True)
        _open.append(self)
        self._thread.start()

    def tick(self) -> None:
        """Progress."""
        self._count += 1

    @contextmanager
    def watching(self, doing: str | Describe, times: int = 1) -> Iterator[None]:
        """Around what ranks do together, `times` the limit long at most without a `tick`.

        `doing` goes on after "waits for", or describes it from the thread's stack. A LostRankError from inside gets the
        first error of all ranks.
        """
        before = self._describe, self._times, self._thread_id, self._active
        self._describe = (lambda frames: _in_a_collective(doing, frames)) if isinstance(doing, str) else doing
        self._times, self._thread_id = times, threading.get_ident()
        self._count += 1
        self._active = True
        try:
            yield
        except LostRankError as error:
            self._active = False
            self._explain(error)
            raise
        finally:
            self._describe, self._times, self._thread_id, self._active = before
            self._count += 1
            self._left = time.monotonic()
            if self._ends.is_set():  # what goes wrong here comes from ranks that end, too: one message is enough
                threading.Event().wait()

    @contextmanager
    def guarding(self, doing: str) -> Iterator[None]:
        """Around the making of what it watches: if that fails, so does the watchdog end."""
        try:
            with self.watching(doing, PATIENT):
                yield
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the others what ends this rank; they end too, within seconds, wherever they wait for it."""
        told = str(error)
        words = f"{type(error).__name__}: {told}" if told else type(error).__name__
        if isinstance(error, LostRankError):
            control.report("lost")
            return
        control.report("fails", words)
        with suppress(RuntimeError):
            self._roll_call.tell_failure(f"{self.name}: {words}")

    def close(self) -> None:
        """End the thread, and tell the supervisor that the pipeline closes."""
        control.report("closes")
        self._stop.set()
        self._thread.join(timeout=5)
        self._roll_call.close()
        if self in _open:
            _open.remove(self)

    @property
    def _limit_s(self) -> float:
        return self._times * self._timeout_s

    @property
    def name(self) -> str:
        """This process's name, for people."""
        return self.names[self._roll_call.process]

    def _explain(self, error: LostRankError) -> None:
        with suppress(RuntimeError):
            error.first_error = self._roll_call.failure() or ""
        if error.first_error:
            time.sleep(_FIRST_ERROR_S)

    # --- on the thread --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        interval = min(self._timeout_s / 10, 1.0)
        seen, failed_s = -1, 0.0
        while not self._stop.wait(interval):
            if not self._active or self._count != seen:
                seen, self._still_s, failed_s = self._count, 0.0, 0.0
            else:
                self._still_s += interval  # and not by the clock: a machine may sleep
            try:
                if not self._silent and self._roll_call.is_called():
                    self._end_all()
                if not self._silent and self._still_s and self._times == 1 and self._roll_call.failure():
                    failed_s += interval
            except RuntimeError as error:
                self._silent = str(error).splitlines()[0]
            if failed_s >= _AFTER_A_FAILURE_S:
                self._end_after_failure()
            if self._still_s >= self._limit_s:
                self._end_all()

    def _standing(self) -> Standing:
        frames = frames_of(self._thread_id)
        at = f" ({found})" if (found := place(frames)) else ""
        if not self._active or self._describe is None:
            outside_s = time.monotonic() - self._left
            return Standing("outside", f"is outside of what ranks do together{at}", outside_s, self.last())
        waits, words = self._describe(frames)
        return Standing("waits" if waits else "busy", words + ("" if waits else at), self._still_s, self.last())

    def _end_all(self) -> None:
        if not _ending.acquire(blocking=False):  # another pipeline of this process does it
            self._stop.wait()
            return
        try:
            for watchdog in _open:
                watchdog._ends.set()
            watchdog = next((watchdog for watchdog in _open if watchdog._active), self)
            self._tell_and_leave(watchdog._standing())
        finally:
            os._exit(EXIT_CODE)

    def _tell_and_leave(self, standing: Standing) -> None:
        try:
            if self._silent:
                raise RuntimeError(self._silent)
            text, is_mine = self._roll_call.report(standing, self.names, self._limit_s)
        except RuntimeError as error:
            why = f"their store does not answer: {str(error).splitlines()[0]}"
            _show(alone(self.name, standing, self._limit_s, why))
            return
        if is_mine or not control.is_connected():
            _show(text)
        if is_mine:
            control.report("hangs", reason_of(text))  # the supervisor may kill this process from now on
        with suppress(RuntimeError):
            self._roll_call.leave_together()

    def _end_after_failure(self) -> None:
        try:
            standing, failure = self._standing(), ""
            with suppress(RuntimeError):
                failure = self._roll_call.failure() or ""
            control.report("lost")
            _show(f"rota: {self.name} {standing.words}, and was ended, because another one failed: {failure}")
        finally:
            os._exit(EXIT_CODE)


_open: list[Watchdog] = []  # of this process
_ending = threading.Lock()


def _in_a_collective(doing: str, frames: list[FrameType]) -> Doing:
    waits = is_in_a_collective(frames)
    return Doing(waits, f"waits for {doing}" if waits else f"is busy before others that wait for {doing}")


def _show(text: str) -> None:
    """In one piece, and whoever holds the lock of sys.stderr; some of it may come from another process's store."""
    os.write(2, f"{printable(text)}\n".encode())
