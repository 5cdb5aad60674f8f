"""What processes report to each other outside of their collectives, over the store that they met at.

first to see a hang   "called" ──▶ all others look now and then, and answer what they do
lowest that answered  one report ──▶ all others end with the same text
one that fails        "failed" ──▶ the others learn of the first error
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import torch.distributed as dist

from rota.runtime.faults.hang_report import Standing, compose
from rota.runtime.torch_internals import own_connection_to_store

Result = TypeVar("Result")

ANSWER_S = 5.0  # long enough for a process on a busy machine, which is not dead
_STORE_S = 5.0  # for one request to the store, which is silent if the process that holds it is stopped
_TOGETHER_S = 2.0  # for what all processes do that have answered
_LOOK_S = 0.02


@final
class RollCall:
    """One process's side of it, per pipeline. Does not need the main thread, which in a hang is in native code.

    Has a connection of its own to the store, since the main thread may be waiting on the other one. Every method may
    raise RuntimeError if the store does not answer.
    """

    def __init__(self) -> None:
        self.process, self._size = dist.get_rank(), dist.get_world_size()
        self._store = own_connection_to_store()
        # All make their pipelines in the same order, so each one's count is the number of the pipeline.
        number = self._store.add(f"rota/pipelines of {self.process}", 1)
        self._failed = f"rota/pipeline {number} failed"
        self._answers: dict[int, Standing] = {}
        self._asks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="rota-roll-call", daemon=True)
        self._thread.start()

    # --- a rank that fails ----------------------------------------------------------------------------------------

    def tell_failure(self, words: str) -> None:
        """The first one counts."""
        self._within(_STORE_S, lambda: self._store.compare_set(self._failed, "", words))

    def failure(self) -> str | None:
        """The words of the first rank that failed."""
        return self._within(_STORE_S, lambda: self._got(self._failed))

    # --- a hang ---------------------------------------------------------------------------------------------------

    def is_called(self) -> bool:
        """Whether a process has seen a hang."""
        return self._within(_STORE_S, lambda: bool(self._store.check([_CALLED])))

    def report(self, mine: Standing, names: Sequence[str], limit_s: float) -> tuple[str, bool]:
        """The text that all processes end with, and whether this one shows it. Needs a few seconds at most."""
        return self._within(ANSWER_S + _TOGETHER_S + _STORE_S, lambda: self._report(mine, names, limit_s))

    def leave_together(self) -> None:
        """Wait until all that answered have the report: the others' collectives notice a rank that ends."""
        self._within(_TOGETHER_S + _STORE_S, self._leave_together)

    def _report(self, mine: Standing, names: Sequence[str], limit_s: float) -> tuple[str, bool]:
        self._store.set(_answer(self.process), mine.to_text())
        called = self._store.compare_set(_CALLED, "", f"{limit_s:g}")  # the limit of the first one that called
        deadline = time.monotonic() + ANSWER_S
        while (text := self._got(_REPORT)) is None:
            answers = self._asked()
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
        num_told = self._store.add(_TOLD, 1)
        while num_told < len(self._asked()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            num_told = self._store.add(_TOLD, 0)
        time.sleep(_LOOK_S * 2)  # for the others to see it, before the process that holds the store is gone

    # --- on the thread --------------------------------------------------------------------------------------------

    def _within(self, limit_s: float, act: Callable[[], Result]) -> Result:
        """What `act` returns, on the thread. RuntimeError if it fails, or is not done within `limit_s`."""
        reply: queue.SimpleQueue[Result | Exception] = queue.SimpleQueue()
        if self._thread.is_alive():
            self._asks.put((act, reply))
        try:
            found = reply.get(timeout=limit_s if self._thread.is_alive() else 0)
        except queue.Empty:
            raise RuntimeError(f"no answer within {limit_s:g} s") from None
        if isinstance(found, Exception):
            raise RuntimeError(str(found)) from found
        return found

    def _serve(self) -> None:
        while (asked := self._asks.get()) is not None:
            act, reply = asked
            try:
                reply.put(act())
            except Exception as error:
                reply.put(error)
        del self._store  # and with it the connection

    def close(self) -> None:
        """End the thread."""
        self._asks.put(None)
        self._thread.join(timeout=1)

    def _asked(self) -> dict[int, Standing]:
        """The answers so far."""
        for process in range(self._size):
            if process not in self._answers and (text := self._got(_answer(process))) is not None:
                standing = Standing.from_text(text)
                if standing is not None:
                    self._answers[process] = standing
        return self._answers

    def _got(self, key: str) -> str | None:
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else None


_CALLED, _REPORT, _TOLD = "rota/hang", "rota/hang report", "rota/hang told"


def _answer(process: int) -> str:
    return f"rota/hang of {process}"
