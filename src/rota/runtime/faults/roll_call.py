"""What processes report to each other outside of collectives, over the store of the default process group.

first to see a hang   "called" ──▶ all others look now and then, and answer with their status
lowest that answered  one report ──▶ all others end with the same text
one that fails        "failed" ──▶ the others learn of the first error
one that loses a rank "lost"   ──▶ those that still wait for the lost rank end
one of those that end "leaves" ──▶ those that lose it end alike: they do not take its end for the first error
one that ends         "ended"  ──▶ those that go on tell that from a loss
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, final

import torch.distributed as dist

from rota.runtime.faults.hang_report import Status, compose, decoded
from rota.torch_internals import own_connection_to_store

Result = TypeVar("Result")
Event: TypeAlias = Literal["failed", "lost", "leaves", "ended"]

ANSWER_S = 5.0  # long enough for a live process on a busy machine
_STORE_S = 5.0  # for one request to the store, which does not answer if the process that holds it is stopped
_TOGETHER_S = 2.0  # for what all processes that have answered do together
_LOOK_S = 0.02


class End(NamedTuple):
    """A rank that has closed its pipeline without an error, after so many calls that all ranks make together."""

    words: str
    num_calls: int


@final
class RollCall:
    """One process's side of one pipeline's roll call, on a thread: in a hang the main thread is in native code.

    It has its own connection to the store, since the main thread may be waiting on the other one. Every method raises
    RuntimeError if the store does not answer.
    """

    def __init__(self) -> None:
        self.process, self._size = dist.get_rank(), dist.get_world_size()
        self._store = own_connection_to_store()
        # All make their pipelines in the same order, so each one's count is the number of the pipeline.
        number = self._store.add(f"rota/pipelines of {self.process}", 1)
        self._pipeline = f"rota/pipeline {number}"
        self._answers: dict[int, Status] = {}
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="rota-roll-call", daemon=True)
        self._thread.start()

    # --- a rank that ends ---------------------------------------------------------------------------------------------

    def publish(self, event: Event, words: str) -> None:
        """Report what happened to this rank; of each event, the first report of all ranks is kept."""
        self._within(_STORE_S, lambda: self._store.compare_set(f"{self._pipeline} {event}", "", words))

    def published(self, *events: Event) -> str | None:
        """The report of the first of these events that was published; None if none was."""

        def reported() -> str | None:
            reports = (self._got(f"{self._pipeline} {event}") for event in events)
            return next((report for report in reports if report is not None), None)

        return self._within(_STORE_S, reported)

    def publish_end(self, end: End) -> None:
        """Report that this rank closes its pipeline without an error; the first report of all ranks is kept."""
        self.publish("ended", json.dumps(end))

    def end(self) -> End | None:
        """The first report of a rank that closed its pipeline, None if there is none, or it is malformed."""
        text = self.published("ended")
        return None if text is None else decoded(text, End)

    # --- a hang ---------------------------------------------------------------------------------------------------

    def is_called(self) -> bool:
        """Whether a process has seen a hang."""
        return self._within(_STORE_S, lambda: bool(self._store.check([_CALLED])))

    def report(self, status: Status, names: Sequence[str], limit_s: float) -> tuple[str, bool]:
        """The text that all processes end with, and whether this one shows it, after a few seconds at most."""
        return self._within(ANSWER_S + _TOGETHER_S + _STORE_S, lambda: self._report(status, names, limit_s))

    def leave_together(self) -> None:
        """Wait until all that answered have the report: as soon as a rank ends, collectives of others fail."""
        self._within(_TOGETHER_S + _STORE_S, self._leave_together)

    def _report(self, status: Status, names: Sequence[str], limit_s: float) -> tuple[str, bool]:
        self._store.set(_answer(self.process), json.dumps(status))
        called = self._store.compare_set(_CALLED, "", f"{limit_s:g}")  # the first caller's limit
        deadline = time.monotonic() + ANSWER_S
        while (text := self._got(_REPORT)) is None:
            answers = self._answers_so_far()
            is_complete, is_late = len(answers) == self._size, time.monotonic() > deadline
            if (is_complete or is_late) and min(answers) == self.process:
                text = compose(names, answers, float(called), ANSWER_S)
                return self._store.compare_set(_REPORT, "", text).decode(), True
            if time.monotonic() > deadline + _TOGETHER_S:  # the process that should report is gone by now
                return compose(names, answers, float(called), ANSWER_S), True
            time.sleep(_LOOK_S)
        return text, False

    def _leave_together(self) -> None:
        deadline = time.monotonic() + _TOGETHER_S
        num_informed = self._store.add(_INFORMED, 1)
        while num_informed < len(self._answers_so_far()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            num_informed = self._store.add(_INFORMED, 0)
        time.sleep(_LOOK_S * 2)  # for the others to see it, before the process that holds the store is gone

    # --- on the thread --------------------------------------------------------------------------------------------

    def _within(self, limit_s: float, act: Callable[[], Result]) -> Result:
        """What `act` returns on the thread. Raises RuntimeError if it fails, or is not done within `limit_s`."""
        reply: queue.SimpleQueue[Result | Exception] = queue.SimpleQueue()
        if self._thread.is_alive():
            self._requests.put((act, reply))
        try:
            result = reply.get(timeout=limit_s if self._thread.is_alive() else 0)
        except queue.Empty:
            raise RuntimeError(f"no answer within {limit_s:g} s") from None
        if isinstance(result, Exception):
            raise RuntimeError(str(result)) from result
        return result

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            act, reply = request
            try:
                reply.put(act())
            except Exception as error:
                reply.put(error)
        del self._store  # and with it the connection

    def close(self) -> None:
        """End the thread."""
        self._requests.put(None)
        self._thread.join(timeout=1)

    def _answers_so_far(self) -> dict[int, Status]:
        """The status of each process that has answered."""
        for process in range(self._size):
            text = None if process in self._answers else self._got(_answer(process))
            if text is not None and (status := decoded(text, Status)) is not None:
                self._answers[process] = status
        return self._answers

    def _got(self, key: str) -> str | None:
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else None


_CALLED, _REPORT, _INFORMED = "rota/hang", "rota/hang report", "rota/hang informed"


def _answer(process: int) -> str:
    return f"rota/hang of {process}"
