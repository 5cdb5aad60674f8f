"""Under `rota run` and torchrun: the first error is told first, one report once, and no process is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rota import Cluster, Costs, place
from rota.schedules import one_f_one_b
from support.faulty_training import processes_in

pytestmark = [pytest.mark.dist, pytest.mark.faults]

SCRIPT = """
import os, signal, sys, time, torch, rota
from torch import nn
torch.manual_seed(0)
plan = rota.given_plan("plan.json")
stages = rota.split(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), plan.num_stages)
with rota.Pipeline(stages, plan, nn.functional.mse_loss, timeout_s={timeout_s}) as pipeline:
    for step in range(4):
        if step == 2 and pipeline.rank == 1:
            {act}
        pipeline.step(torch.ones(8, 4), torch.ones(8, 4))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "3", "train.py")
ROTA_RUN = ("-m", "rota", "run", "plan.json", "train.py")


def launched(folder: Path, launcher: tuple[str, ...], act: str, timeout_s: int = 60) -> str:
    """Standard error, when all have ended."""
    (folder / "plan.json").write_text(one_f_one_b(place(Costs.uniform(3), Cluster.uniform(3)), 4).to_json())
    (folder / "train.py").write_text(SCRIPT.format(act=act, timeout_s=timeout_s))
    done = subprocess.run(
        [sys.executable, *launcher],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1, done
    assert processes_in(folder) == []
    return done.stderr


@pytest.mark.parametrize("launcher", [ROTA_RUN, TORCHRUN], ids=["rota run", "torchrun"])
def test_an_error_between_two_steps(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    told = launched(tmp_path, launcher, "raise ValueError('broken on purpose')")
    first = next(line for line in told.splitlines() if "Error: " in line and "LostRankError" not in line)
    assert first.endswith("ValueError: broken on purpose"), told
    for lost in re.findall(r"lost a rank while .*", told):
        assert "the first error was that of rank 1: ValueError: broken on purpose" in lost
    if launcher == ROTA_RUN:
        assert "rank 1 ended with exit code 1, and the others were ended" in told
    else:
        assert re.search(r"Root Cause .*\n(.*\n){3} +rank +: 1 ", told), told


@pytest.mark.parametrize("launcher", [ROTA_RUN, TORCHRUN], ids=["rota run", "torchrun"])
def test_a_rank_that_hangs(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    told = launched(tmp_path, launcher, "time.sleep(1000)", timeout_s=4)
    reports = re.findall(r"^rota: no progress for 4 s, so all ranks end: (.*)$", told, flags=re.MULTILINE)
    assert reports == ["rank 1 never reached what the others wait for"] * (1 if launcher == ROTA_RUN else 3), told
    assert "rank 1 is outside of the pipeline's calls (train.py:10 in <module>)" in told, told
    assert "LostRankError" not in told


@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_a_rank_that_is_gone(tmp_path: Path, how: str) -> None:
    told = launched(tmp_path, ROTA_RUN, f"os.kill(os.getpid(), signal.{how})", timeout_s=4)
    if how == "SIGSTOP":
        assert told.count("all ranks end: rank 1 never answered; it is stopped, dead, or without a pipeline") == 1
        assert "the run hung (rank 1 never answered; it is stopped, dead, or without a pipeline), and all ranks" in told
    else:
        assert "rank 1 ended with SIGKILL, and the others were ended" in told
