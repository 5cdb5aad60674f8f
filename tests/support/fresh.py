"""Processes of their own for a test in which some of them hang, fail or are ended."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any

from support.pool import LIMIT_S, forking_context


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    exit_code: int | None
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
    context: Any = None,
    joins: bool = True,
) -> list[Ended]:
    """`function(rank, *args)` on new processes that share a Gloo group, unless they join one by themselves.

    Those left when the `expected` ranks (default: all) have ended, or after `timeout_s`, are killed: exit code None.
    """
    context = context or forking_context()
    files = [folder / f"stderr{rank}" for rank in range(num_ranks)]
    processes = [
        context.Process(
            target=_child, args=(rank, num_ranks, folder / "store" if joins else None, files[rank], function, args)
        )
        for rank in range(num_ranks)
    ]
    started = monotonic()
    ended: set[int] = set()
    for process in processes:
        process.start()
    awaited = {*range(num_ranks)} if expected is None else {*expected}
    while not awaited <= ended and monotonic() < started + timeout_s:
        wait([p.sentinel for rank, p in enumerate(processes) if rank not in ended], started + timeout_s - monotonic())
        for rank, process in enumerate(processes):
            if not process.is_alive():
                ended.add(rank)
    for process in processes:
        process.kill()
        process.join()
    results = []
    for rank, process in enumerate(processes):
        text = files[rank].read_text().rstrip("\n") if files[rank].exists() else ""
        results.append(Ended(process.exitcode if rank in ended else None, text))
    return results


def _child(
    rank: int, num_ranks: int, store: Path | None, file: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    if store is not None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    function(rank, *args)
