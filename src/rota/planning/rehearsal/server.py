"""Starts the ranks of a rehearsal: it has loaded torch and has no threads, so that it can fork them.

python -m rota.planning.rehearsal.server FOLDER
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from datetime import timedelta
from itertools import count, takewhile
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from rota.errors import LostRankError
from rota.plan import Plan
from rota.planning.rehearsal.processes import plan_file, report_file, stderr_file
from rota.planning.rehearsal.rank import run_rank
from rota.profiling.sleeping import set_timer_slack_ns
from rota.runtime.environment import loopback
from rota.runtime.orphans import end_with_parent

_PR_SET_NAME = 15  # linux/prctl.h
_LOOK_EVERY_S = 0.05
_LET_FIRST_ERROR_BE_SEEN_S = 2.0


def main() -> None:
    """Start all ranks and write to standard output which failed first (null: none), if the caller is still there."""
    (folder,) = sys.argv[1:]
    caller = os.dup(1)
    os.dup2(2, 1)  # other output is not for the caller
    files = takewhile(Path.exists, (plan_file(folder, number) for number in count()))
    plans = [Plan.from_json(file.read_text()) for file in files]
    for backend in ("GLOO", "NCCL"):
        os.environ[f"{backend}_SOCKET_IFNAME"] = loopback()  # no rank listens to other machines
    running: dict[int, int] = {}
    failed, code = None, 0
    try:
        for rank in range(plans[0].num_ranks):
            running[_fork(plans, folder, rank, caller)] = rank
        while running and failed is None:
            if select.select([0], [], [], _LOOK_EVERY_S)[0]:
                break  # the caller has closed our input, or is gone
            failed, code = _reap(running)
    finally:
        for process in running:
            os.kill(process, signal.SIGKILL)
        for process in running:
            os.waitpid(process, 0)
    if running and failed is None:
        shutil.rmtree(folder, ignore_errors=True)  # the caller, which normally does this, may be gone
        return
    _send(caller, rank=failed, code=code)


def _reap(running: dict[int, int]) -> tuple[int | None, int]:
    """Remove the processes that have ended; returns the first one that failed, if any, and its exit code."""
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            break
        rank, code = running.pop(process), os.waitstatus_to_exitcode(status)
        if code:
            return rank, code
    return None, 0


def _send(caller: int, **fields: int | None) -> None:
    os.write(caller, f"{json.dumps(fields)}\n".encode())


def _fork(plans: list[Plan], folder: str, rank: int, caller: int) -> int:
    """Fork a new rank; returns its process id."""
    server = os.getpid()
    process = os.fork()
    if not process:
        end_with_parent(server)
        if sys.platform == "linux":
            _set_up(rank)
        _run(plans, folder, rank, caller)
    return process


def _run(plans: list[Plan], folder: str, rank: int, caller: int) -> NoReturn:
    os.dup2(os.open(stderr_file(folder, rank), os.O_WRONLY | os.O_CREAT), 2)
    try:
        torch.set_num_threads(1)
        options = json.loads(Path(folder, "options.json").read_text())
        kind = options.pop("device")
        num_ranks = plans[0].num_ranks
        store = dist.FileStore(str(Path(folder, "store")), num_ranks)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=options["timeout_s"]))  # for all to join, and to leave
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        step_ended = (lambda num_ended: _send(caller, num_ended=num_ended)) if rank == 0 else lambda _: None
        report = run_rank(plans, **options, step_ended=step_ended, device=_device(kind, rank))
        report_file(folder, rank).write_text(report.to_json())
        if store.add("done", 1) == num_ranks:
            store.set("all done", "")
        store.wait(["all done"])  # a rank that leaves earlier would count as lost
    except LostRankError as error:
        print(error, file=sys.stderr)
        time.sleep(_LET_FIRST_ERROR_BE_SEEN_S)
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # at once: nothing is left to clean up


def _device(kind: str, rank: int) -> torch.device:
    """The rank's own, as PyTorch's current one. Only ranks use an accelerator: what had done so could not be forked."""
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, rank)
    torch.accelerator.set_device_index(device)
    return device


def _set_up(rank: int) -> None:
    """Set the process's name and the precision of its sleeps."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rota rank {rank}".encode())
    set_timer_slack_ns(1)


if __name__ == "__main__":
    main()
