"""Fresh interpreters, one per rank, as `rota run` starts them: for an accelerator a forked process would not do."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.fresh import Ended, run_fresh


class RankFailed(AssertionError):
    """A rank raised, died or took too long; the message has its last words."""


def run_ranks(
    folder: Path,
    num_ranks: int,
    device_type: str,
    job: Callable[..., Any],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    device_group: bool = False,
    timeout_s: float = 120,
) -> list[Ended]:
    """`job(rank, device, *args)` on new processes, each with its own device of this type.

    `device_group`: the default process group takes the device's tensors too, as FSDP needs it; else Rota makes it.
    """
    from rota.runtime.environment import meeting_environments

    folder.mkdir(parents=True, exist_ok=True)
    meetings = meeting_environments(str(folder), num_ranks)
    environments = [{**meeting, "ROTA_DEVICE": device_type, **(environment or {})} for meeting in meetings]
    payload = pickle.dumps((job, args))  # read once the rank has its environment: the job imports torch
    options = {"timeout_s": timeout_s, "context": multiprocessing.get_context("spawn"), "joins": False}
    return run_fresh(folder, num_ranks, _run, folder, environments, device_group, payload, **options)  # type: ignore[arg-type]


def results_of(folder: Path, num_ranks: int, device_type: str, job: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """What the ranks return. Raises RankFailed."""
    ended = run_ranks(folder, num_ranks, device_type, job, *args, **how)
    if any(each.exit_code != 0 for each in ended):
        told = [f"rank {rank}: exit code {each.exit_code}\n{each.stderr[-3000:]}" for rank, each in enumerate(ended)]
        raise RankFailed("\n".join(told))
    return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(num_ranks)]


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result{rank}"


class RankPool:
    """`run` as of `support.pool.Pool`, for tests that were written for the CPU: all stages and batches are moved."""

    def __init__(self, folder: Path, device_type: str) -> None:
        self._folder, self._device_type, self._jobs = folder, device_type, 0
        self.environment: dict[str, str] = {}

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60) -> Any:
        self._jobs += 1
        folder = self._folder / f"job{self._jobs}"
        # Of a new interpreter the start alone takes seconds.
        options = {"timeout_s": 60 + timeout_s, "environment": self.environment}
        return results_of(folder, num_ranks, self._device_type, moved, function, *args, **options)

    def renew(self) -> None:
        """All processes are new."""


def moved(rank: int, device: Any, function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, on the CPU, if pipelines move their stages and batches to `device`."""
    from support.moved import on_cpu, pipelines_on

    with pipelines_on(device):
        return on_cpu(function(rank, *args))


def _run(rank: int, folder: Path, environments: list[dict[str, str]], device_group: bool, payload: bytes) -> None:
    os.environ.update(environments[rank])
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
    _result(folder, rank).write_bytes(pickle.dumps(job(rank, device, *args)))
    dist.destroy_process_group()
