"""Processes of their own for a test in which some of them hang, fail or are ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any

from support.pool import LIMIT_S, forking_context

#: Begins a line of stderr that `mark` has written.
MARK = "marked at "


@dataclass(frozen=True)
class Ended:
    """How a process ended: `after_s` counts from the test's call of `mark`, or from the start without one."""

    exit_code: int | None
    after_s: float
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of stderr but for the notes that Rota adds to a stage's own error."""
        lines = self.stderr.strip().splitlines()
        return next(line for line in reversed(lines) if not line.startswith("rota: in "))


def run_fresh(
    folder: Path,
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    expected: Collection[int] | None = None,
    timeout_s: float = LIMIT_S,
) -> list[Ended]:
    """`function(rank, *args)` on new processes that share a Gloo group.

    Those left when the `expected` ranks (default: all) have ended, or after `timeout_s`, are killed: exit code None.
    """
    context = forking_context()
    files = [folder / f"stderr{rank}" for rank in range(num_ranks)]
    processes = [
        context.Process(target=_child, args=(rank, num_ranks, folder / "store", files[rank], function, args))
        for rank in range(num_ranks)
    ]
    started = monotonic()
    ended: dict[int, float] = {}
    for process in processes:
        process.start()
    awaited = {*range(num_ranks)} if expected is None else {*expected}
    while not awaited <= ended.keys() and monotonic() < started + timeout_s:
        wait([p.sentinel for rank, p in enumerate(processes) if rank not in ended], started + timeout_s - monotonic())
        for rank, process in enumerate(processes):
            if not process.is_alive():
                ended.setdefault(rank, monotonic())
    for process in processes:
        process.kill()
        process.join()
    results = []
    for rank, process in enumerate(processes):
        lines = files[rank].read_text().splitlines() if files[rank].exists() else []
        marks = [float(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
        text = "\n".join(line for line in lines if not line.startswith(MARK))
        begun = marks[-1] if marks else started
        code = process.exitcode if rank in ended else None
        results.append(Ended(code, ended.get(rank, monotonic()) - begun, text))
    return results


def mark() -> None:
    """From now on the process's time counts."""
    print(f"{MARK}{monotonic()}", file=sys.stderr, flush=True)


def _child(
    rank: int, num_ranks: int, store: Path, file: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    function(rank, *args)
