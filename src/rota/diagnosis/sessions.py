"""Starts the ranks of an examination on this machine, and starts others for what is left where they fail or hang."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rota.diagnosis.rank import ERROR, OPTIONS, RESULTS, Options, Step
from rota.diagnosis.report import say
from rota.errors import PipelineError
from rota.runtime.launching.launch import start
from rota.runtime.launching.rank_processes import RankFailed, Ranks
from rota.runtime.launching.requests import EndedBySignal, Requests
from rota.runtime.launching.run_folder import run_folder

_MOST_FAILURES = 2  # of the steps of one session: then the others would fail in the same way


class Outcome(NamedTuple):
    """What became of a step: its result, or why there is none. `was_begun`: whether it is the step that failed."""

    step: Step
    result: Any = None
    error: str = ""
    was_begun: bool = False


def run_steps(num_ranks: int, kind: str, steps: Sequence[Step], timeout_s: float, deadline_s: float) -> list[Outcome]:
    """Do the steps on `num_ranks` new processes.

    Args:
        num_ranks: How many.
        kind: Of the ranks' devices, such as "cpu" or "cuda".
        steps: What they do.
        timeout_s: How long a rank may make no progress.
        deadline_s: No step begins after this time, on the monotonic clock.

    Returns:
        One outcome per step, in their order.
    """
    outcomes: list[Outcome] = []
    failures = 0
    while len(outcomes) < len(steps):
        left = steps[len(outcomes) :]
        if failures == _MOST_FAILURES:
            return outcomes + [Outcome(step, error="not tried after these failures") for step in left]
        if time.monotonic() >= deadline_s:
            return outcomes + [Outcome(step, error="no time was left for it") for step in left]
        say(f"starting {num_ranks} process{'es' if num_ranks != 1 else ''} on {kind}")
        try:
            done, error = _session(num_ranks, Options(left, kind, timeout_s, deadline_s))
        except EndedBySignal as ended:
            signal.raise_signal(ended.number)  # now it does what it does without ranks: most signals end this process
            raise
        outcomes += [Outcome(step, result, was_begun=True) for step, result in zip(left, done, strict=False)]
        if error:
            failures += 1
            outcomes.append(Outcome(left[len(done)], error=error, was_begun=True))
    return outcomes


def _session(num_ranks: int, options: Options) -> tuple[list[Any], str]:
    """The results of the steps that one set of processes did, and why it did not do the next one."""
    with run_folder("rota-doctor-") as folder, Requests() as requests, Ranks(folder, requests) as ranks:
        Path(folder.path, OPTIONS).write_text(options.to_json())
        command = ("-P", "-m", "rota.diagnosis.rank", folder.path)
        error = ""
        try:
            start(ranks, num_ranks, command, folder, {"OMP_NUM_THREADS": "1"})
            ranks.wait()
        except RankFailed as failed:
            error = _reason(folder.path, str(failed))
        except EndedBySignal:
            raise
        except PipelineError as refused:  # no process could be started
            error = str(refused)
        results = _results(folder.path)
    if not error and len(results) < len(options.steps):
        error = "" if time.monotonic() >= options.deadline_s else "the ranks ended early"
    return results, error


def _results(folder: str) -> list[Any]:
    """The results that the first rank has written."""
    path = Path(folder, RESULTS)
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            _, result = json.loads(line)
        except ValueError:  # a line that was cut off when the rank was killed
            break
        if result is not None:
            found.append(result)
    return found


def _reason(folder: str, failed: str) -> str:
    """What the rank that failed first says, else how it ended."""
    first = re.match(r"rank (\d+) ", failed)
    path = Path(folder, f"{ERROR}{first[1] if first else ''}")
    words = path.read_text().strip() if first and path.exists() else ""
    return f"rank {first[1]}: {words}" if first and words else failed
