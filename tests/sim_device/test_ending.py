"""A rank that loses another ends, whatever its device and the groups of its script still wait for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rota import Cluster, Costs, Pipeline, Plan, place
from rota.runtime import process_group
from rota.schedules import one_f_one_b
from support.fresh import run_fresh
from support.networks import batch_of, chain, loss_fn
from support.pool import LIMIT_S
from support.sim_device import SimDevice
from support.sim_device.groups import SimGroup
from support.sim_device.pool import pipelines_on_sim


def hang(*_: Any) -> None:
    time.sleep(1000)


def plan_of(num_ranks: int) -> Plan:
    return one_f_one_b(place(Costs.uniform(num_ranks, 10, 20, boundary_bytes=8), Cluster.uniform(num_ranks)), 4)


def lose_a_rank(rank: int, where: str) -> None:
    """Rank 1 goes; no abort of rank 0 ends, nor does what its script does then, as if it left groups of its own."""
    process_group._ABORT_S = 0.05
    SimGroup.abort = hang  # type: ignore[method-assign]
    with SimDevice(f"rank {rank}").active(), pipelines_on_sim([]), Pipeline(chain(2), plan_of(2), loss_fn) as pipeline:
        pipeline.step(*batch_of(4))
        if rank == 1 and where == "between steps":
            os._exit(9)
        if rank == 1:
            pipeline.stages[1].register_forward_pre_hook(lambda *_: os._exit(9))
        try:
            pipeline.step(*batch_of(4))
        finally:
            hang()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("where", "lost"),
    [("between steps", "a rank while waiting for the others to begin the step"), ("in a step", "rank 1 while .+")],
)
def test_a_rank_reports_and_ends_beside_kernels_that_wait(tmp_path: Path, where: str, lost: str) -> None:
    first, second = run_fresh(tmp_path, 2, lose_a_rank, where)
    assert (first.exit_code, second.exit_code) == (1, 9), (first, second)
    report = f"rota: rank 0: LostRankError: lost {lost}: look there for the first error [(].+:.+ in .+[)]"
    assert re.fullmatch(report, first.stderr), first


SCRIPT = """
import atexit, sys, time
atexit.register(time.sleep, 1000)  # as Python's clean-up waits for kernels of the script's own groups
import torch.distributed as dist
from rota import Pipeline
from support.networks import batch_of, chain, loss_fn
from support.sim_device import SimDevice
from sim_device.test_ending import plan_of

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
with SimDevice().active():
    pipeline = Pipeline(chain(2).to("sim"), plan_of(2), loss_fn)
    for step in range(2):
        pipeline.step(*(tensor.to("sim") for tensor in batch_of(4)))
        if rank == 0:
            SCOPE: 1 / 0
"""


@pytest.mark.dist
@pytest.mark.parametrize("scope", ["with pipeline", "if True"])
def test_an_error_of_its_own_is_shown_and_ends_it(tmp_path: Path, scope: str) -> None:
    """Also where nothing but the end of the script closes the pipeline."""
    command, store = [sys.executable, "-c", SCRIPT.replace("SCOPE", scope)], str(tmp_path / "store")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "env": environment}
    ranks = [subprocess.Popen([*command, str(rank), store], **pipes) for rank in range(2)]
    try:
        first, second = (rank.communicate(timeout=LIMIT_S)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [1, 1], (first, second)
    assert first.endswith("ZeroDivisionError: division by zero\n"), first
    assert "the first error was that of rank 0: ZeroDivisionError: division by zero" in second
