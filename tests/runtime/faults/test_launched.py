"""Under `rota run` and torchrun: the first error is told first, one report once, and no process is left."""

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
from pathlib import Path
from torch import nn
from support.watch_clock import WatchClock, once_all_are, once_stopped
os.environ["RANK"] == "1" or WatchClock({is_due})  # rank 1 has no reason to end by itself
torch.manual_seed(0)
plan = rota.given_plan("plan.json")
stages = rota.split(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), plan.num_stages)
with rota.Pipeline(stages, plan, nn.functional.mse_loss, timeout_s=60) as pipeline:
    for step in range(4):
        if step == 2 and pipeline.rank == 1:
            {act}
        pipeline.step(torch.ones(8, 4), torch.ones(8, 4))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "3", "train.py")
ROTA_RUN = ("-m", "rota", "run", "plan.json", "train.py")


def launched(folder: Path, launcher: tuple[str, ...], act: str, is_due: str = "lambda _: False") -> str:
    """Standard error, when all have ended. `is_due`: for WatchClock."""
    (folder / "plan.json").write_text(one_f_one_b(place(Costs.uniform(3), Cluster.uniform(3)), 4).to_json())
    (folder / "train.py").write_text(SCRIPT.format(act=act, is_due=is_due))
    done = subprocess.run(
        [sys.executable, *launcher],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1, done
    assert processes_in(folder) == []
    return done.stderr


@pytest.mark.parametrize("launcher", [ROTA_RUN, TORCHRUN], ids=["rota run", "torchrun"])
def test_an_error_between_two_steps(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """torchrun calls the process that ends first the root cause, whose error may be that it lost another one."""
    told = launched(tmp_path, launcher, "raise ValueError('broken on purpose')")
    first = next(line for line in told.splitlines() if "Error: " in line and "LostRankError" not in line)
    assert first.endswith("ValueError: broken on purpose"), told
    for lost in re.findall(r"lost a rank while .*", told):
        assert "the first error was that of rank 1: ValueError: broken on purpose" in lost
    if launcher == ROTA_RUN:
        assert "rank 1 ended with exit code 1, and the others were ended" in told


@pytest.mark.parametrize("launcher", [ROTA_RUN, TORCHRUN], ids=["rota run", "torchrun"])
def test_a_rank_that_hangs(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    waits = "waits for .* reach the same step .* in step 3"
    where = {0: waits, 1: "never matched: it says so itself", 2: waits}
    is_due = f"once_all_are(Path({str(tmp_path)!r}), int(os.environ['RANK']), {where!r})"
    told = launched(tmp_path, launcher, "(Path('is there 1').touch(), time.sleep(1000))", is_due)
    reports = re.findall(r"^rota: no progress for 60 s, so all ranks end: (.*)$", told, flags=re.MULTILINE)
    assert reports == ["rank 1 never reached what the others wait for"] * (1 if launcher == ROTA_RUN else 3), told
    assert "rank 1 is outside of the pipeline's calls (train.py:13 in <module>)" in told, told
    assert "LostRankError" not in told


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    act = "Path('pid').write_text(str(os.getpid())); os.kill(os.getpid(), signal.SIGSTOP)"
    told = launched(tmp_path, ROTA_RUN, act, f"once_stopped(Path({str(tmp_path / 'pid')!r}))")
    assert told.count("all ranks end: rank 1 never answered; it is stopped, dead, or without a pipeline") == 1
    assert "the run hung (rank 1 never answered; it is stopped, dead, or without a pipeline), and all ranks" in told
