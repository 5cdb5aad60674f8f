"""Two pipelines in opposite directions with the same weights (Chimera): every rank starts at once, bubbles are halved.

torchrun --nproc-per-node 4 examples/bidirectional.py     four processes, two stages on each
python examples/bidirectional.py                          the same training on one, with the same losses
"""

import os

import torch
from torch import nn

import rota

NUM_RANKS, NUM_MICROBATCHES, NUM_STEPS = 4, 8, 20

torch.set_default_dtype(torch.float64)
data = torch.Generator().manual_seed(1)  # of its own: a pipeline draws from the global one for dropout
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(NUM_RANKS)]
model = nn.Sequential(*layers, nn.Linear(32, 1))


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, and something that is not linear in them."""
    x = torch.randn(32, 32, generator=data)
    return x, (x[:, :1] * x[:, 1:2]).sin()


def train_on_one_process() -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        inputs, targets = make_batch()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.9f}, norm {norm:.9f}")


def train_on_four() -> None:
    costs = rota.Costs.uniform(NUM_RANKS, forward_us=100, backward_us=200)
    placement = rota.bidirectional(costs, rota.Cluster.uniform(NUM_RANKS))
    plan = rota.schedules.chimera(placement, NUM_MICROBATCHES)
    with rota.Pipeline(rota.split(model, NUM_RANKS), plan, nn.functional.mse_loss) as pipeline:
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=1e-2)
        for step in range(NUM_STEPS):
            loss = pipeline.step(*make_batch())  # gradients are summed over both copies of each stage
            norm = pipeline.clip_grad_norm_(0.5)  # of the whole model, every weight counted once
            optimizer.step()  # equal gradients and equal weights: the copies stay equal
            optimizer.zero_grad()
            if pipeline.rank == 0:
                print(f"step {step}: loss {loss:.9f}, norm {norm:.9f}")


if __name__ == "__main__":
    train_on_four() if "RANK" in os.environ else train_on_one_process()
