"""What is trained: train.py FORWARD_MS SLOW_RANK FACTOR FROM TO STEPS. Stages that wait, and one rank that is slow.

The stages wait instead of computing, so that four ranks on two cores take no time from each other. The backward waits
twice as long. In the steps FROM to TO the stages of SLOW_RANK take FACTOR times as long.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rota

ROWS, WIDTH = 2, 8
wait_ms = 0.0


class Waiting(torch.autograd.Function):
    """The value itself, after a while; in the backward after twice as long."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(wait_ms / 1000)
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * wait_ms / 1000)
        return gradients[0]


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Waiting.apply(torch.tanh(self.linear(x)))
        return found


def main(forward_ms: float, slow_rank: int, factor: float, first: int, last: int, num_steps: int) -> None:
    global wait_ms
    torch.manual_seed(0)
    plan = rota.given_plan()
    stages = rota.split(nn.Sequential(*(Stage() for _ in range(plan.num_stages))).double(), plan.num_stages)
    with rota.Pipeline(stages, plan, nn.functional.mse_loss) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)
        with Path("steps").open("a") as file:
            for step in range(1, num_steps + 1):
                is_slow = pipeline.rank == slow_rank and first <= step < last
                wait_ms = forward_ms * (factor if is_slow else 1)
                x = torch.randn(ROWS * plan.num_microbatches, WIDTH, dtype=torch.float64)
                begun_s = time.monotonic()
                loss = pipeline.step(x, x.flip(1))
                took_s = time.monotonic() - begun_s
                optimizer.step()
                optimizer.zero_grad()
                if pipeline.rank == 0:
                    file.write(f"{step} {loss!r} {took_s}\n")


if __name__ == "__main__":
    forward, rank, times, *steps = sys.argv[1:]
    main(float(forward), int(rank), float(times), *map(int, steps))
