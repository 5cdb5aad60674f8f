"""Fresh interpreters, one per rank, as `rota run` starts them: for an accelerator a forked process would not do."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import patch

from support.fresh import MARK


@dataclass(frozen=True)
class Ended:
    """How a rank ended. `exit_code`: None if it was killed because the time was up; `after_s` as of `support.fresh`."""

    result: Any
    exit_code: int | None
    after_s: float
    stderr: str


class RankFailed(AssertionError):
    """A rank raised, died or took too long; the message has its last words."""


def run_ranks(
    folder: Path,
    num_ranks: int,
    device_type: str,
    job: Callable[..., Any],
    *args: Any,
    expected: Collection[int] | None = None,
    environment: Mapping[str, str] | None = None,
    device_group: bool = False,
    timeout_s: float = 120,
) -> list[Ended]:
    """`job(rank, device, *args)` on new processes, each with its own device of this type.

    Those left when the `expected` ranks (default: all) have ended, or after `timeout_s`, are killed. `device_group`:
    the default process group takes the device's tensors too, as FSDP and DDP need it; else Rota makes it.
    """
    from rota.runtime.environment import meeting_environments

    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    files = [folder / f"stderr{rank}" for rank in range(num_ranks)]
    processes, pipes = [], []
    payload = pickle.dumps((job, args))  # read once the rank has its environment: the job imports torch
    started = monotonic()
    for rank, meeting in enumerate(meeting_environments(str(folder), num_ranks)):
        ours, theirs = context.Pipe(duplex=False)
        with patch.dict(os.environ, {**meeting, "ROTA_DEVICE": device_type, **(environment or {})}):
            given = (rank, theirs, files[rank], device_group, payload)
            process = context.Process(target=_child, args=given, name=f"rank {rank}", daemon=True)
            process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    awaited = {*range(num_ranks)} if expected is None else {*expected}
    results, ended = _await(processes, pipes, awaited, started + timeout_s)
    return [_ended(rank, processes[rank], files[rank], results.get(rank), started, ended) for rank in range(num_ranks)]


def _await(
    processes: list[Any], pipes: list[Connection], awaited: set[int], deadline: float
) -> tuple[dict[int, Any], dict[int, float]]:
    """The results, and when each rank ended. A result is read at once: a large one would block its rank."""
    results: dict[int, Any] = {}
    ended: dict[int, float] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    try:
        while not awaited <= ended.keys() and monotonic() < deadline:
            sentinels = [process.sentinel for rank, process in enumerate(processes) if rank not in ended]
            for ready in wait([*sentinels, *open_pipes], max(deadline - monotonic(), 0)):
                if ready in open_pipes:
                    rank = open_pipes.pop(ready)  # type: ignore[arg-type]
                    with suppress(EOFError):
                        results[rank] = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
            for rank, process in enumerate(processes):
                if not process.is_alive():
                    ended.setdefault(rank, monotonic())
        _print_stacks(process for rank, process in enumerate(processes) if rank not in ended)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results, ended


def _print_stacks(left: Iterable[Any]) -> None:
    """Of ranks that have not ended, to their stderr."""
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        process.join(1)


def _ended(rank: int, process: Any, file: Path, result: Any, started: float, ended: dict[int, float]) -> Ended:
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    marks = [float(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    text = "\n".join(line for line in lines if not line.startswith(MARK))
    after_s = ended.get(rank, monotonic()) - (marks[-1] if marks else started)
    return Ended(result, process.exitcode if rank in ended else None, after_s, text)


def results_of(folder: Path, num_ranks: int, device_type: str, job: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """What the ranks return. Raises RankFailed."""
    ended = run_ranks(folder, num_ranks, device_type, job, *args, **how)
    if any(one.exit_code != 0 for one in ended):
        told = [f"rank {rank}: exit code {one.exit_code}\n{one.stderr[-3000:]}" for rank, one in enumerate(ended)]
        raise RankFailed("\n".join(told))
    return [one.result for one in ended]


class RankPool:
    """`run` as of `support.pool.Pool`, for tests that were written for the CPU: all stages and batches are moved."""

    def __init__(self, folder: Path, device_type: str) -> None:
        self._folder, self._device_type, self._jobs = folder, device_type, 0

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60) -> Any:
        self._jobs += 1
        folder = self._folder / f"job{self._jobs}"
        # Of a new interpreter the start alone takes seconds.
        return results_of(folder, num_ranks, self._device_type, moved, function, *args, timeout_s=60 + timeout_s)

    def renew(self) -> None:
        """All processes are new."""


def moved(rank: int, device: Any, function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, on the CPU, if pipelines move their stages and batches to `device`."""
    from support.moved import on_cpu, pipelines_on

    with pipelines_on(device):
        return on_cpu(function(rank, *args))


def _child(rank: int, pipe: Connection, file: Path, device_group: bool, payload: bytes) -> None:
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.register(signal.SIGUSR1)
    try:
        import torch
        import torch.distributed as dist

        import rota
        from rota.runtime.device.local import group_backend
        from rota.runtime.process_group import join, meet_by_environment

        torch.set_num_threads(1)
        device = rota.local_device()
        if device_group:
            meet_by_environment()
            dist.init_process_group(group_backend())
        else:
            join()
        job, args = pickle.loads(payload)
        pipe.send_bytes(pickle.dumps(job(rank, device, *args)))
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)
