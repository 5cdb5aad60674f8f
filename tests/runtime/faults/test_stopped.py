"""SIGSTOP: a process that is there, and does nothing; its connections stay open."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from rota import Pipeline
from rota.runtime.faults.watchdog import EXIT_CODE
from support.faulty_training import Fault, Setup, run_case
from support.fresh import run_fresh
from support.networks import batch_of, chain, loss_fn
from support.pool import Pool
from support.watch_clock import WatchClock, once_stopped

pytestmark = [pytest.mark.dist, pytest.mark.faults]

ZB, REPLICAS = Setup(), Setup("1f1b", 2, 2)

CASES = [
    *((ZB, Fault("stop", rank, f"{rank}F2")) for rank in (0, 2)),
    (ZB, Fault("stop", 1, "1W1")),
    (ZB, Fault("stop", 1, "between steps")),
    (ZB, Fault("stop", 2, "clip")),
    (REPLICAS, Fault("stop", 2, "reduction")),
]


@pytest.mark.parametrize(
    ("setup", "fault"), CASES, ids=[f"{number}-{fault}" for number, (_, fault) in enumerate(CASES)]
)
def test_stopped(pool: Pool, tmp_path: Path, setup: Setup, fault: Fault) -> None:
    run_case(pool, tmp_path, setup, fault)


def step_without_the_store(rank: int, port: int, pid_file: Path) -> None:
    """The processes meet at the first one, which is stopped."""
    WatchClock(once_stopped(pid_file))
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    with Pipeline(chain(3), ZB.plan(), loss_fn, timeout_s=60) as pipeline:
        pipeline.step(*batch_of(4))
        if rank == 0:
            pid_file.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        pipeline.step(*batch_of(4))


def test_the_process_that_holds_the_store(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ended = run_fresh(tmp_path, 3, step_without_the_store, port, tmp_path / "pid", expected=(1, 2))
    for rank in (1, 2):
        assert ended[rank].exit_code == EXIT_CODE, ended
        told = f"rank {rank} waits for the other ranks to reach the same step for "
        assert "rota: no progress for 60 s, and the other ranks could not be asked (their store does not answer: " in (
            ended[rank].stderr
        )
        assert told in ended[rank].stderr
