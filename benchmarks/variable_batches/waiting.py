"""How long steps wait for the plans of their batches: rota.Planner, in a run whose stages sleep for as long as planned.

python benchmarks/variable_batches/waiting.py [--ranks 8] [--batches 30] [--cold]

Batches have 720 samples on 8 ranks, which the planner groups into about 64 micro-batches. Stages sleep instead of
computing, so that ranks can share cores; plans, messages, the planner's process and threads are real. --cold lets the
planner compile its loops, as in the first run on a machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_SAMPLES, WIDTH = 90, 8  # samples per rank
FORWARD_US, PER_TOKEN_US = 300, 0.6


def start(num_ranks: int, num_batches: int, cold: bool) -> int:
    """Run this file on all ranks."""
    import rota

    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        costs = rota.Costs.uniform(num_ranks, 100, 200)
        plan.write_text(rota.schedules.one_f_one_b(rota.place(costs, rota.Cluster.uniform(num_ranks)), 8).to_json())
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if cold:
            environment["NUMBA_CACHE_DIR"] = folder
        command = [sys.executable, "-m", "rota", "run", str(plan), __file__, "--on-a-rank", str(num_batches)]
        return subprocess.run(command, env=environment, check=False).returncode


def train(num_batches: int) -> None:
    """On one rank."""
    import numpy as np
    import torch
    from torch import nn

    import rota

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context, x, us):  # type: ignore[no-untyped-def]
            context.us = us
            time.sleep(us / 1e6)
            return x.clone()

        @staticmethod
        def backward(context, gradient):  # type: ignore[no-untyped-def]
            time.sleep(2 * context.us / 1e6)
            return gradient, None

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Sleep.apply(x * self.scale, FORWARD_US + PER_TOKEN_US * x.shape[0] * x.shape[1])

    def collate(samples: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(samples), length, WIDTH), torch.zeros(len(samples))

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return output.sum(), len(targets)

    torch.set_num_threads(1)
    plan, rng = rota.given_plan(), np.random.default_rng(0)
    p = plan.num_ranks
    model = rota.SizeModel(
        (rota.Curve(FORWARD_US, PER_TOKEN_US),) * p,
        (rota.Curve(2 * FORWARD_US, 2 * PER_TOKEN_US),) * p,
        boundary_bytes=(rota.Curve(0, 4 * WIDTH),) * (p - 1),
    )
    drawn = [np.minimum(rng.lognormal(5.3, 0.9, NUM_SAMPLES * p).astype(int) + 8, 2000) for _ in range(num_batches)]
    batches = [of_batch.tolist() for of_batch in drawn]
    waits_us: list[int] = []
    with rota.Pipeline(rota.Stages([Stage() for _ in range(p)]), plan, loss_fn, check_data="never") as pipeline:
        if pipeline.rank == 0:
            print("batch  micro-batches  planned in  step     predicted  waited")
        planner = rota.Planner(pipeline, batches, collate, model, length_of=lambda length: length)
        for batch in planner:
            begun_s = time.monotonic()
            pipeline.step(batch.inputs, batch.targets, plan=batch.plan, sizes=batch.sizes)
            took_us = (time.monotonic() - begun_s) * 1e6
            waits_us.append(batch.waited_us)
            if pipeline.rank == 0:
                times = f"{batch.planning_us / 1e3:7.0f} ms {took_us / 1e3:6.0f} ms {batch.makespan_us / 1e3:6.0f} ms"
                waited = f"{batch.waited_us / 1e3:6.1f} ms"
                print(f"{len(waits_us) - 1:5}  {len(batch.sizes):13}  {times}  {waited}", flush=True)
        worst = torch.tensor(waits_us)
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    if pipeline.rank == 0:
        print(f"after the first batch, no rank waited for a plan for more than {max(worst.tolist()[1:]) / 1e3:.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--on-a-rank", type=int, default=0)
    given = parser.parse_args()
    if given.on_a_rank:
        train(given.on_a_rank)
    else:
        sys.exit(start(given.ranks, given.batches, given.cold))
