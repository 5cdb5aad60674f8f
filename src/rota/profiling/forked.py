"""Work on several processes of this machine at once, forked from this one, so that models need no pickling."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from rota.core.errors import PipelineError, RotaError, error_text
from rota.core.text import count_text
from rota.runtime.environment import end_with_parent, meeting_environments

_TICK_S = 1.0
_OF_ANOTHER_RUN = ("ROTA_", "TORCHELASTIC_")  # the first letters of environment variables


def run_forked(
    num_processes: int,
    work: Callable[[int], Any],
    *,
    within_s: float = math.inf,
    tick: Callable[[], None] = lambda: None,
) -> list[Any]:
    """What `work(number)` returns on each of `num_processes` new processes of one process group over Gloo.

    Each has one thread. The results travel as JSON. The first process that fails ends all of them.

    Args:
        num_processes: How many processes.
        work: What each of them does, given its number.
        within_s: Seconds after which all of them are ended.
        tick: Called every second while they work.

    Raises:
        PipelineError: If one fails, with its error.
        TimeoutError: If they have not ended in time.
    """
    began_s = time.monotonic()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="rota-forked-") as folder:
        workers = {}
        try:
            for number, environment in enumerate(meeting_environments(folder, num_processes)):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_main, args=(theirs, work, number, environment, os.getpid()))
                sys.stdout.flush()  # what is buffered here must not be written again by a child
                sys.stderr.flush()
                process.start()
                theirs.close()
                workers[ours] = number, process
            made: list[Any] = [None] * num_processes
            waiting = [*workers]
            while waiting:
                ended = wait(waiting, _TICK_S)
                tick()
                if not ended and time.monotonic() - began_s > within_s:
                    raise TimeoutError(
                        f"{count_text(num_processes, 'process', 'es')} did not end within {within_s:.0f} s"
                    )
                for pipe in ended:
                    assert isinstance(pipe, Connection)
                    number, process = workers[pipe]
                    made[number] = _result(pipe, number, process)
                    waiting.remove(pipe)
            return made
        finally:
            for _, process in workers.values():
                process.kill()
                process.join()


def _result(pipe: Connection, number: int, process: ForkProcess) -> Any:
    try:
        answer = json.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise PipelineError(
            f"measuring process {number} ended with {how} before it had a result; see above for its output"
        ) from None
    if "failed" in answer:
        raise PipelineError(answer["failed"])
    return answer["made"]


def _main(
    pipe: Connection, work: Callable[[int], Any], number: int, environment: Mapping[str, str], parent: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    end_with_parent(parent)
    torch.set_num_threads(1)  # as in a run; and a forked process must not use the parent's thread pool
    for name in [name for name in os.environ if name.startswith(_OF_ANOTHER_RUN)]:
        del os.environ[name]
    os.environ.update(environment)
    try:
        answer = {"made": work(number)}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_ours = isinstance(error, RotaError)
        answer = {"failed": str(error) if is_ours else f"{error_text(error)} ({last.filename}:{last.lineno})"}
    pipe.send_bytes(json.dumps(answer).encode())
