"""What a run costs before its first step: a rank loads nothing that it does not run."""

import os
import subprocess
import sys
from pathlib import Path

import rota
from support import ROOT

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
