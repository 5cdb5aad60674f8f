"""What `rota run` promises about the network, limits of time, and processes that a script forks."""

import os
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import rota
from rota import Cluster, Costs, place
from rota.profiling.machine_links import links_of_started
from rota.schedules import one_f_one_b
from support import ROOT
from support.faulty_training import processes_in
from support.sampling import swept

pytestmark = pytest.mark.dist

PLAN = one_f_one_b(place(Costs.uniform(2), Cluster.uniform(2)), 2)

SCRIPT = """
import os, sys, time, torch, rota
from torch import nn
plan = rota.given_plan()
stages = rota.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), plan.num_stages)
{before}
with rota.Pipeline(stages, plan, nn.functional.mse_loss) as pipeline:
    pipeline.step(torch.ones(4, 2), torch.ones(4, 2))
    {inside}
"""


def run(folder: Path, *options: str, before: str = "", inside: str = "pass") -> subprocess.CompletedProcess[str]:
    (folder / "plan.json").write_text(PLAN.to_json())
    (folder / "train.py").write_text(SCRIPT.format(before=before, inside=inside))
    command = [sys.executable, "-m", "rota", "run", *options, "plan.json", "train.py"]
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=220)
    assert processes_in(folder) == []
    return done


def listening(process: int) -> list[str]:
    """The addresses at which the process and all that it has started accept connections, as the kernel writes them."""
    families = {process}
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    while more := {child for child, parent in parents.items() if parent in families} - families:
        families |= more
    inodes = set()
    for member in families:
        try:
            inodes |= {os.readlink(link)[8:-1] for link in Path(f"/proc/{member}/fd").iterdir()}
        except OSError:
            continue
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@pytest.mark.parametrize("before", ["", swept("torch.distributed.init_process_group('gloo')"), swept("rota.mesh()")])
def test_nothing_listens_beyond_loopback(tmp_path: Path, before: str) -> None:
    """Neither the launcher nor any rank, whoever makes the process group; and only this user enters the folder."""
    inside = (
        "from runtime.launching.test_launching import listening; "
        "pipeline.rank or print('listening', *listening(os.getppid()), os.stat(os.environ['ROTA_FOLDER']).st_mode); "
        "pipeline.step(torch.ones(4, 2), torch.ones(4, 2))"  # the others are there until then
    )
    done = run(tmp_path, before=before, inside=inside)
    assert done.returncode == 0, done.stderr
    (told,) = re.findall(r"^listening (.*)$", done.stdout, flags=re.MULTILINE)
    *addresses, mode = told.split()
    assert len(addresses) >= 2  # Gloo's, on each rank
    assert {*addresses} <= LOOPBACK
    assert int(mode) & 0o777 == 0o700


@pytest.mark.sweep
def test_no_process_that_measures_listens_beyond_loopback() -> None:
    start = partial(links_of_started, 2, "cpu", 2)
    thread = threading.Thread(target=start)
    thread.start()
    seen = set()
    while thread.is_alive():
        seen |= {*listening(os.getpid())}
        time.sleep(0.1)
    thread.join()
    assert seen
    assert seen <= LOOPBACK


@pytest.mark.faults
@pytest.mark.parametrize(
    ("options", "before"), [(("--timeout", "0.4"), ""), ((), "os.environ['RANK'] == '0' and rota.mesh(timeout_s=0.4)")]
)
def test_the_time_before_the_pipeline_has_a_limit(tmp_path: Path, options: tuple[str, ...], before: str) -> None:
    done = run(tmp_path, *options, before=f"os.environ['RANK'] == '1' and time.sleep(1000)\n{before}")
    assert done.returncode == 1
    assert "rota: rank 0: process 1 has not joined the others within 4 s; look there for the first error" in done.stderr


@pytest.mark.faults
def test_the_limit_holds_for_the_pipeline_too(tmp_path: Path) -> None:
    done = run(tmp_path, "--timeout", "20", inside="pipeline.rank and time.sleep(1000); pipeline.clip_grad_norm_(1.0)")
    assert done.returncode == 1
    assert "rota: no progress for 20 s, so all ranks end: rank 1 never reached what the others wait for" in done.stderr
    assert "the run hung (rank 1 never reached what the others wait for), and all ranks were ended" in done.stderr


FORKS = "child = os.fork(); {child}; code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]); print('child', code); "
CHILDREN = {"child or 1 / 0": 1, "child or sys.exit(5)": 5, "child or pipeline.close(); child or sys.exit()": 0}


@pytest.mark.faults
def test_a_forked_process_ends_by_itself(tmp_path: Path) -> None:
    """And leaves the rank's pipeline alone, which takes one more step."""
    step = "pipeline.step(torch.ones(4, 2), torch.ones(4, 2)); "
    done = run(tmp_path, inside="".join(FORKS.format(child=child) + step for child in CHILDREN))
    assert done.returncode == 0, done.stderr
    for code in CHILDREN.values():
        assert done.stdout.count(f"child {code}\n") == 2


@pytest.mark.faults
def test_no_rank_outlives_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, rota, signal, time\nrota.mesh()\ntorch_s = os.getppid()\n"
        "if os.environ['RANK'] == '0': os.kill(torch_s, signal.SIGKILL)\ntime.sleep(1000)"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=150)
    assert done.returncode == -9
    # Its ranks held the pipes: they were gone when `run` returned.
    assert processes_in(tmp_path) == []


# --- what a run costs before its first step: a rank loads nothing that it does not run --------------------------------


# Making an optimizer loads torch._dynamo, and that sympy: PyTorch's own doing, which the script may leave out.
_RANK = """
import sys, torch, rota
import torch.distributed as dist
from rota.runtime.launching import worker
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
plan = rota.Plan.from_json(open(sys.argv[1]).read())
stages = rota.split(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), 2)
with rota.Pipeline(stages, plan, torch.nn.functional.mse_loss) as pipeline:
    pipeline.step(torch.ones(4, 2), torch.ones(4, 1))
    pipeline.evaluate(torch.ones(4, 2), torch.ones(4, 1))
print("trained", *(name for name in {heavy} if name in sys.modules))
"""
_NOT_ON_A_RANK = (
    *("numba", "ortools", "matplotlib", "safetensors", "sympy", "torch._dynamo", "torch._inductor", "torch.onnx"),
    *("torch.distributed.checkpoint", "torch.distributed.pipelining", "torch.distributed.fsdp"),
    *("rota.search", "rota.profiling", "rota.planning", "rota.drawing", "rota.verifying", "rota.interop"),
)


def output_of(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]  # of the workers, too
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=200, env=environment)
    return done.stdout.strip()


def plan_file(folder: Path, num_ranks: int) -> str:
    placement = rota.interleaved(rota.Costs.uniform(2), rota.Cluster.uniform(num_ranks))
    (folder / "plan.json").write_text(rota.schedules.gpipe(placement, 2).to_json())
    return str(folder / "plan.json")


def test_a_rank_loads_nothing_that_it_does_not_run(tmp_path: Path) -> None:
    assert output_of(_RANK.format(heavy=_NOT_ON_A_RANK), plan_file(tmp_path, 1)) == "trained"
