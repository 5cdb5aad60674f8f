"""A training on replicas whose ranks are killed: python … replicated_training.py NUM_STEPS|epochs [JOIN_AT]

It writes each step, its loss and the plan's number of ranks to `losses` in the working folder; with epochs of a
shuffled loader, also the samples of each process. `faults.json` there has [step, replica, rank] of the ranks that are
killed in the middle of a step, each once, or with "wait" as a fourth entry wait there for a file `go`. On several
nodes, FIRST is the number of a node's first process. While a rank is missing, the others wait for it at step JOIN_AT.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rota
from rota.runtime.environment import has_backups

NUM_STAGES, NUM_MICROBATCHES, WIDTH = 2, 4, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + nn.functional.dropout(x, 0.1, self.training)


def train(
    plan: rota.Plan, num_steps: int, folder: Path | None = None, join_at: int = -1, dp: int = 1
) -> list[tuple[int, float]]:
    """Each step and its loss. In a folder: goes on from memory, and suffers the faults there."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(NUM_STAGES))).double()
    losses = []
    with rota.Pipeline(
        rota.split(model, plan.num_stages), plan, nn.functional.mse_loss, mesh=rota.mesh(dp=dp)
    ) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        checkpoints = found = None
        if folder is not None:
            checkpoints = rota.Checkpoints(folder / "run", pipeline, optimizer)
            found = checkpoints.load()
        for step in range(found.step if found else 0, num_steps):
            if folder is not None:
                suffer(folder, step, pipeline)
                if step == join_at and pipeline.plan.merged_replicas > 1:
                    time.sleep(60)
            x = torch.randn(4 * NUM_MICROBATCHES, WIDTH, dtype=torch.float64)
            mine = slice(pipeline.replica, None, pipeline.num_replicas)
            losses.append((step, pipeline.step(x[mine], x.flip(1)[mine])))
            optimizer.step()
            optimizer.zero_grad()
            if checkpoints is not None:
                checkpoints.commit(step + 1)
            if folder is not None and pipeline.rank == pipeline.replica == 0:
                with (folder / "losses").open("a") as file:
                    file.write(json.dumps([*losses[-1], plan.num_ranks]) + "\n")
    return losses


NUM_SAMPLES = 5 * 4 * NUM_MICROBATCHES - 3  # 5 steps per epoch; replicas get different numbers of rows in the last one


def train_epochs(plan: rota.Plan, folder: Path, join_at: int = -1) -> None:
    """Two epochs; suffers the faults in the folder."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(NUM_STAGES))).double()
    x = torch.randn(NUM_SAMPLES, WIDTH, dtype=torch.float64)
    dataset = TensorDataset(x, torch.arange(NUM_SAMPLES))
    with rota.Pipeline(rota.split(model, plan.num_stages), plan, nn.functional.mse_loss, mesh=rota.mesh()) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        num_rows = 4 * NUM_MICROBATCHES // pipeline.num_replicas
        loader = DataLoader(dataset, num_rows, sampler=pipeline.sampler(dataset))
        checkpoints = rota.Checkpoints(folder / "run", pipeline, optimizer)
        for step, (rows, numbers) in checkpoints.steps(loader, num_epochs=2):
            suffer(folder, step, pipeline)
            if step == join_at and pipeline.plan.merged_replicas > 1:
                time.sleep(60)
            loss = pipeline.step(rows, rows.flip(1))
            optimizer.step()
            optimizer.zero_grad()
            if pipeline.rank == 0:
                with (folder / "losses").open("a") as file:
                    file.write(json.dumps([step, loss, plan.num_ranks, numbers.tolist()]) + "\n")


def suffer(folder: Path, step: int, pipeline: rota.Pipeline) -> None:
    """Kill this process in its third forward of the step, or wait there, if it is one's turn."""
    assert has_backups()
    number = int(os.environ.get("FIRST", "0")) + int(os.environ["LOCAL_RANK"])  # the same while others are missing
    me = [step, *divmod(number, NUM_STAGES)]
    done = folder / f"fault-{me}"
    faults = json.loads((folder / "faults.json").read_text())
    is_wait = [*me, "wait"] in faults
    if not (is_wait or me in faults) or done.exists():
        return
    seen = []

    def fail(*_: Any) -> None:
        seen.append(1)
        if len(seen) == 3:
            done.touch()
            if not is_wait:
                os.kill(os.getpid(), signal.SIGKILL)
            while not (folder / "go").exists():
                time.sleep(0.05)

    next(iter(pipeline.local_stages.values())).register_forward_pre_hook(fail)


if __name__ == "__main__":
    at = int(sys.argv[2]) if len(sys.argv) > 2 else -1
    if sys.argv[1] == "epochs":
        train_epochs(rota.given_plan(), Path.cwd(), at)
    else:
        train(rota.given_plan(), int(sys.argv[1]), Path.cwd(), at)
