"""What is trained on replicas: train.py WIDTH ROWS. It commits every step, and saves none."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import rota


def main(width: int, rows: int) -> None:
    torch.manual_seed(0)
    plan = rota.given_plan()
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(plan.num_stages)]
    stages = rota.split(nn.Sequential(*layers).double(), plan.num_stages)
    with rota.Pipeline(stages, plan, nn.functional.mse_loss, mesh=rota.mesh()) as pipeline:
        Path(f"pid-{os.environ['LOCAL_RANK']}").write_text(str(os.getpid()))
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        checkpoints = rota.Checkpoints("run", pipeline, optimizer)
        found = checkpoints.load()
        step = found.step if found else 0
        mine = slice(pipeline.replica, None, pipeline.num_replicas)
        with Path("losses").open("a") as file:
            while True:
                x = torch.randn(rows, width, dtype=torch.float64)
                loss = pipeline.step(x[mine], x.flip(1)[mine])
                optimizer.step()
                optimizer.zero_grad()
                if pipeline.rank == pipeline.replica == 0:
                    file.write(f"{step} {loss!r} {plan.num_ranks} {time.monotonic()}\n")
                    file.flush()
                step += 1
                checkpoints.commit(step)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
