"""A rank is slower than planned: Rota plans again with the times of a measured step, and the next steps run that plan.

rota plan 1f1b --ranks 3 --microbatches 8 --forward-us 4000 --backward-us 8000 -o plan.json
rota run plan.json examples/adapting.py     three processes, of which the first takes 1.5 times as long as planned

Nothing restarts, and no weight moves. All ranks get the same timeline and make the same search, so they find the
same plan.
"""

import sys
import time

import torch
from torch import nn

import rota

NUM_STEPS, EVERY = 30, int(sys.argv[1]) if len(sys.argv) > 1 else 10


class Layer(nn.Module):
    """It takes `ms` forward and twice that backward, on any machine."""

    def __init__(self, ms: int) -> None:
        super().__init__()
        self.linear, self.ms = nn.Linear(16, 16), ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.ms / 1000)
        y = self.linear(x).tanh()
        y.register_hook(lambda _: time.sleep(2 * self.ms / 1000))
        return y


def better(measured: rota.Timeline) -> rota.Plan:
    """The plan of the measured step, with its times, and in another order of ops if one saves at least 1% of a step."""
    calibration = rota.calibrate([measured])
    placement, num_microbatches = calibration.plan.placement, calibration.plan.num_microbatches
    found = rota.find_plan(placement, num_microbatches, time_limit_s=1, deterministic=True)
    calibration = calibration.with_plan("the order that was searched for", found.plan)
    if pipeline.rank == 0:
        print(calibration.verdict().splitlines()[0])
    return calibration.chosen


torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x, target = torch.randn(32, 16), torch.zeros(32, 16)
plan = rota.given_plan()
stages = rota.split(nn.Sequential(Layer(6), Layer(4), Layer(4)), plan.num_stages, plan.cuts)
with rota.Pipeline(stages, plan, nn.functional.mse_loss) as pipeline:
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
    for step in range(1, NUM_STEPS + 1):
        began_s = time.monotonic()
        loss = pipeline.step(x, target, plan=plan)
        if pipeline.rank == 0:
            print(f"step {step}: loss {loss:.9f}, {1000 * (time.monotonic() - began_s):.0f} ms")
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            plan = better(pipeline.timeline())
