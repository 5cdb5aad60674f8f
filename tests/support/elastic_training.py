"""A training that is disturbed on purpose, by `rota run` or torchrun: elastic_training.py NUM_STEPS [KIND]

KIND is "epochs", or "any-number" (of ranks, each with its plan), or nothing.
It writes each step's loss to `losses` in the working folder. `faults.json` there says what goes wrong: [step, who,
what], each once; `who` is a rank, or what the environment's NODE says.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import rota
from rota.runtime import control

NUM_STAGES, NUM_MICROBATCHES, WIDTH = 4, 4, 6
COSTS = rota.Costs.uniform(NUM_STAGES, 100, 200)
PLAN = rota.schedules.one_f_one_b(rota.place(COSTS, rota.Cluster.uniform(NUM_STAGES)), NUM_MICROBATCHES)
ON_TWO = rota.schedules.gpipe(rota.place(COSTS, rota.Cluster.uniform(2), ranks=(0, 0, 1, 1)), NUM_MICROBATCHES)
NUM_STEPS = 12
LAUNCHER = os.getppid()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + nn.functional.dropout(x, 0.1, self.training)


def train(plan: rota.Plan, num_steps: int, folder: Path | None = None) -> list[tuple[int, float]]:
    """Each step and its loss. In a folder: goes on from the newest checkpoint there, and suffers its faults."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(NUM_STAGES))).double()
    losses = []
    with rota.Pipeline(rota.split(model, plan.num_stages), plan, nn.functional.mse_loss) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        resumed = checkpoints = None
        if folder is not None:
            checkpoints = rota.Checkpoints(folder / "run", pipeline, optimizer)
            resumed = checkpoints.load()
        for step in range(resumed.step if resumed else 0, num_steps):
            if folder is not None:
                suffer(folder, step, pipeline)
            x = torch.randn(2 * NUM_MICROBATCHES, WIDTH, dtype=torch.float64)
            losses.append((step, pipeline.step(x, x.flip(1))))
            optimizer.step()
            optimizer.zero_grad()
            if folder is not None and pipeline.rank == 0:
                with (folder / "losses").open("a") as file:
                    file.write(json.dumps([*losses[-1], plan.num_ranks]) + "\n")
            if checkpoints is not None and ((step + 1) % 2 == 0 or pipeline.should_stop):
                checkpoints.save(step + 1)
            if pipeline.should_stop:
                break
    return losses


def undisturbed(rank: int, plan: rota.Plan) -> list[tuple[int, float]]:
    return train(plan, NUM_STEPS)


def suffer(folder: Path, step: int, pipeline: rota.Pipeline) -> None:
    for at, who, what in json.loads((folder / "faults.json").read_text()):
        done = folder / f"fault-{at}-{who}-{pipeline.rank if isinstance(who, str) else ''}"
        if at == step and who in (pipeline.rank, os.environ.get("NODE")) and not done.exists():
            done.touch()
            if what in ("SIGUSR1", "SIGTERM"):
                os.kill(os.getpid(), signal.Signals[what])
            elif what.startswith("launcher "):
                os.kill(LAUNCHER, signal.Signals[what.split()[1]])
                while what != "launcher SIGSTOP" and not control.stop_is_asked():
                    time.sleep(0.01)
            elif what == "wait":
                time.sleep(1000)
            else:
                in_the_middle_of_a_step(pipeline, what)


def in_the_middle_of_a_step(pipeline: rota.Pipeline, what: str) -> None:
    module = next(iter(pipeline.local_stages.values()))
    seen = []

    def fail(*_: Any) -> None:
        seen.append(1)
        if len(seen) < 3:
            return
        if what == "raise":
            raise ValueError("broken on purpose")
        if what == "node":  # the whole machine is gone, torchrun's agent first
            os.kill(LAUNCHER, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    module.register_forward_pre_hook(fail)


NUM_SAMPLES = 5 * 2 * NUM_MICROBATCHES


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Augmented by random numbers of the workers; with its number, by which it is told from others."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return number / NUM_SAMPLES + torch.rand(WIDTH, dtype=torch.float64), number


def train_epochs(plan: rota.Plan, num_epochs: int, folder: Path) -> None:
    """Writes each step, its loss and its samples to `losses` in the folder, and suffers its faults."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(NUM_STAGES))).double()
    loader = DataLoader(Samples(), batch_size=2 * NUM_MICROBATCHES, shuffle=True, num_workers=2)
    with rota.Pipeline(rota.split(model, plan.num_stages), plan, nn.functional.mse_loss) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        checkpoints = rota.Checkpoints(folder / "run", pipeline, optimizer)
        for step, (x, numbers) in checkpoints.steps(loader, num_epochs=num_epochs, save_every=4):
            suffer(folder, step, pipeline)
            loss = pipeline.step(x, x.flip(1))
            optimizer.step()
            optimizer.zero_grad()
            if pipeline.rank == 0:
                with (folder / "losses").open("a") as file:
                    file.write(json.dumps([step, loss, numbers.tolist()]) + "\n")


if __name__ == "__main__":
    if "epochs" in sys.argv:
        train_epochs(rota.given_plan("plan.json"), 3, Path.cwd())
    else:
        of_number = f"-{os.environ['WORLD_SIZE']}" if "any-number" in sys.argv else ""
        train(rota.given_plan(f"plan{of_number}.json"), int(sys.argv[1]), Path.cwd())
