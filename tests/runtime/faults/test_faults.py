"""Faults: all processes end with the right message, and the next run goes on as if nothing had been.

Those after the first six have the mark `faults`. All of these are processes by themselves; test_launched, and
`tests/runtime/launching/test_deaths.py`, have them under `rota run`.
"""

import os
import signal
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rota import Pipeline
from rota.runtime.faults.watchdog import EXIT_CODE
from support.faulty_training import Fault, Setup, run_case
from support.fresh import run_fresh
from support.networks import batch_of, chain, loss_fn
from support.pages import python_blocks
from support.pool import Pool
from support.watch_clock import WatchClock, once_stopped

pytestmark = pytest.mark.dist

ZB, B, AGAIN = Setup(), Setup("1f1b"), Setup("again")
REPLICAS, LARGE, LATER = Setup("1f1b", 2, 2), Setup(width=6 * 100), Setup(asynchronous=True)

#: One of each sort.
FIRST = [
    (ZB, Fault("kill", 1, "1I2")),
    (REPLICAS, Fault("kill", 3, "reduction")),
    (ZB, Fault("stop", 0, "0F2")),
    (ZB, Fault("raise", 2, "backward")),
    (ZB, Fault("fill", 1, "write")),
    (ZB, Fault("shut", 1, "1F2")),
]
#: SIGKILL at each kind of op, and wherever else ranks wait for each other; each moment with another rank.
KILLED = [
    (ZB, Fault("kill", 0, "0F1")),
    (ZB, Fault("kill", 2, "2W3")),
    (B, Fault("kill", 2, "2B1")),
    (AGAIN, Fault("kill", 1, "1R0")),
    # while it waits for a value: killed by the one that would send it
    (ZB, Fault("kill 1", 0, "0F2")),
    (ZB, Fault("kill 0", 1, "1I1")),
    # while what it sent is on the wire, megabytes of it
    (LARGE, Fault("kill", 0, "after 0F1")),
    (LARGE, Fault("kill", 2, "after 2I1")),
    # while replicas average gradients
    (REPLICAS, Fault("kill", 0, "reduction")),
    # between and after steps
    (ZB, Fault("kill", 1, "between steps")),
    (ZB, Fault("kill", 2, "losses")),
    (ZB, Fault("kill", 0, "clip")),
    # while checkpoints are written
    (ZB, Fault("kill", 1, "write")),
    (LATER, Fault("kill", 0, "write")),
    (ZB, Fault("kill", 0, "publish")),
]
#: Errors on one rank, a loss that is nan, a full disk, connections that are shut.
FAILING = [
    (ZB, Fault("raise", 0, "forward")),
    (ZB, Fault("raise", 1, "backward")),
    (ZB, Fault("raise", 1, "1W2")),
    (ZB, Fault("raise", 2, "loss")),
    # while the others begin a step, add up losses, clip, reduce, save
    (ZB, Fault("raise", 2, "between steps")),
    (ZB, Fault("raise", 1, "losses")),
    (ZB, Fault("raise", 0, "clip")),
    (REPLICAS, Fault("raise", 3, "reduction")),
    (ZB, Fault("interrupt", 1, "forward")),
    (ZB, Fault("interrupt", 0, "clip")),
    (ZB, Fault("exit", 1, "between steps")),
    (ZB, Fault("exit", 2, "clip")),
    (ZB, Fault("nan", 2, "3")),
    (ZB, Fault("fill", 0, "write")),
    (LATER, Fault("fill", 1, "write")),
    (ZB, Fault("shut", 0, "0F2")),
    (ZB, Fault("shut", 1, "1W1")),
]
#: SIGSTOP: a process that is there, and does nothing; its connections stay open.
STOPPED = [
    (ZB, Fault("stop", 2, "2F2")),
    (ZB, Fault("stop", 1, "1W1")),
    (ZB, Fault("stop", 1, "between steps")),
    (ZB, Fault("stop", 2, "clip")),
    (REPLICAS, Fault("stop", 2, "reduction")),
]
CASES = [
    *(pytest.param(setup, fault, id=str(fault)) for setup, fault in FIRST),
    *(
        pytest.param(setup, fault, id=f"{number}-{fault}", marks=pytest.mark.faults)
        for number, (setup, fault) in enumerate([*KILLED, *FAILING, *STOPPED])
    ),
]


@pytest.mark.parametrize(("setup", "fault"), CASES)
def test_fault(pool: Pool, tmp_path: Path, setup: Setup, fault: Fault) -> None:
    run_case(pool, tmp_path, setup, fault)


def run_block(rank: int, code: str) -> float:
    metrics = torch.ones(1)
    with Pipeline(chain(3), Setup().plan(), loss_fn) as pipeline:
        exec(code, {"pipeline": pipeline, "metrics": metrics, "torch": torch})
    return metrics.item()


def test_the_code_of_the_docs_runs(pool: Pool) -> None:
    (code,) = python_blocks("elastic.md#When something goes wrong")
    assert pool.run(3, run_block, code) == [3.0] * 3


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


@pytest.mark.faults
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
