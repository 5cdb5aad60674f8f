"""A search for other orders, in a process of its own beside the training: see `rota.search.reordering`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, final

from rota.errors import RotaError
from rota.plan import Plan

_SEARCH_S = 10.0
_MOST_S = 120.0  # with its imports, on a machine that the training uses


class Answer(NamedTuple):
    """The orders that a search found, or `error`, why it found none. See `rota.search.reordering.Reordered`."""

    plan: Plan | None = None
    before_us: int = 0
    makespan_us: int = 0
    bound_us: int = 0
    error: str = ""

    @property
    def gain(self) -> float:
        """By how much a step gets shorter, as a fraction of it."""
        return 1 - self.makespan_us / self.before_us if self.before_us else 0.0


@final
class BackgroundSearch:
    """One search at a time. It has the lowest priority and one thread, and ends after two minutes at the latest."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._answer: Answer | None = None

    @property
    def is_running(self) -> bool:
        """Whether a search was begun whose answer has not been taken."""
        return self._thread is not None

    def begin(self, plan: Plan, others: Sequence[Plan]) -> None:
        """Search for better orders than those of `plan` and of the others, all with the costs to search for."""
        request = {
            "plan": plan.to_json(),
            "others": [other.to_json() for other in others],
            "time_limit_s": _SEARCH_S,
        }
        self._answer = None
        found = os.pathsep.join(filter(None, sys.path))  # where this process finds Rota
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rota.search.reordering"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": found, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
        )
        self._thread = threading.Thread(target=self._ask, args=(self._process, request), daemon=True)
        self._thread.start()

    def _ask(self, process: subprocess.Popen[str], request: dict[str, Any]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        latest = threading.Timer(_MOST_S, process.kill)
        latest.daemon = True
        latest.start()
        try:
            process.stdin.write(f"{json.dumps(request)}\n")
            process.stdin.flush()  # and stays open: the process ends when it is closed
            line = process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        finally:
            latest.cancel()
        self._answer = _read(line)

    def taken(self) -> Answer | None:
        """The answer, once; None while there is none."""
        if self._thread is None or (self._thread.is_alive() and self._answer is None):
            return None
        answer = self._answer
        self.close()
        return answer

    def close(self) -> None:
        """End the search, if one is running."""
        if self._process is not None:
            self._process.kill()
        if self._thread is not None:
            self._thread.join()
        if self._process is not None:
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):  # what was not written yet, to a process that has ended
                    if pipe is not None:
                        pipe.close()
        self._process = self._thread = None


def _read(line: str) -> Answer:
    if not line:
        return Answer(error="its process has ended without an answer")
    try:
        fields = json.loads(line)
        if "error" in fields:
            return Answer(error=str(fields["error"]))
        before_us, makespan_us, bound_us = (int(fields[name]) for name in ("before_us", "makespan_us", "bound_us"))
        return Answer(Plan.from_json(fields["plan"]), before_us, makespan_us, bound_us)
    except (RotaError, ValueError, KeyError, TypeError) as error:
        return Answer(error=f"{type(error).__name__}: {error}")
