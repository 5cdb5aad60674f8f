"""What is trained, in a folder of its own: train.py NUM_STEPS [SECONDS_A_STEP], without the latter undisturbed.

The first rank writes each step, its loss to the last bit and the number of ranks to `losses`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import rota

WIDTH, NUM_LAYERS, ROWS = 16, 8, 16


def main(num_steps: int, pause_s: float | None) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(NUM_LAYERS)]
    plan = rota.given_plan()
    stages = rota.split(nn.Sequential(*layers).double(), plan.num_stages)
    with rota.Pipeline(stages, plan, nn.functional.mse_loss) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        found = checkpoints = None
        if pause_s is not None:
            checkpoints = rota.Checkpoints("run", pipeline, optimizer, scheduler, asynchronous=True)
            found = checkpoints.load()
        for step in range(found.step if found else 0, num_steps):
            x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
            loss = pipeline.step(x, x.flip(1))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if pipeline.rank == 0:
                with Path("losses").open("a") as file:
                    file.write(f"{step} {loss.hex()} {plan.num_ranks}\n")
            if checkpoints is not None:
                time.sleep(pause_s or 0)
                if (step + 1) % 20 == 0 or pipeline.should_stop:
                    checkpoints.save(step + 1)
                if pipeline.should_stop:
                    break


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else None)
