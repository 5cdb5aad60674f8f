"""Replicas that may be lost: each is a Rota pipeline under a torchrun of its own; torchft averages their gradients.

If a replica is killed, the others repeat the step without it. Started again, it takes their weights and goes on.

pip install 'rota[examples]'
rota plan 1f1b --ranks 2 --microbatches 4 -o plan.json
torchft_lighthouse --min_replicas 1     one for all replicas
export TORCHFT_LIGHTHOUSE=http://localhost:29510
REPLICA=0 torchrun --standalone --nproc-per-node 2 examples/torchft_replicas.py
REPLICA=1 torchrun --standalone --nproc-per-node 2 examples/torchft_replicas.py     in another terminal
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torchft import Manager, ProcessGroupGloo

import rota

LIMIT = timedelta(seconds=60)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))).double()


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step, of which each replica takes a part."""
    x = torch.randn(24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, x.sin()


def state() -> dict[str, Any]:
    """What a replica that is new takes from another one: each rank, from the same rank."""
    return {"weights": dict(pipeline.named_parameters()), "optimizer": optimizer.state_dict()}


@torch.no_grad()
def load(found: dict[str, Any]) -> None:
    for name, weight in pipeline.named_parameters():
        weight.copy_(found["weights"][name])
    optimizer.load_state_dict(found["optimizer"])


if __name__ == "__main__":
    num_steps, replica = int(sys.argv[1]) if sys.argv[1:] else 100, os.environ["REPLICA"]
    plan = rota.given_plan("plan.json")
    stages = rota.split(make_model(), plan.num_stages, plan.cuts)
    with rota.Pipeline(stages, plan, nn.functional.mse_loss) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
        group = ProcessGroupGloo(timeout=LIMIT)  # this rank of all replicas: their gradients are of the same stages
        options = {"use_async_quorum": False, "timeout": LIMIT, "hostname": "localhost"}
        manager = Manager(group, load, state, min_replica_size=1, replica_id=f"replica{replica}-", **options)
        while manager.current_step() < num_steps:
            manager.start_quorum()  # who takes part in this step; behind it, a new replica has the others' state
            step, part, num_parts = manager.current_step(), manager.participating_rank(), manager.num_participants()
            loss = pipeline.step(*(whole.tensor_split(num_parts)[part] for whole in make_batch(step)))
            for weight in pipeline.parameters():
                manager.allreduce(weight.grad).wait()
            if manager.should_commit():  # on all ranks or on none; otherwise the step is done again
                optimizer.step()
                if pipeline.rank == 0:
                    print(f"replica {replica}, step {step}: loss {loss:.9f}, {num_parts} replicas", flush=True)
            optimizer.zero_grad()
        manager.shutdown()
