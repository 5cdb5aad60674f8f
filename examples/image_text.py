"""Does the text describe the image? Two branches, each on half of the ranks, meet in a stage on all (the K shape).

rank 0  text 0 ────────┐            text 0: words to vectors        image 0: convolution
rank 1          text 1 ┴┬ match     text 1: layer                   image 1: layer
rank 2  image 0 ───────┬┘ match     match: its hidden layer is dealt to all four ranks
rank 3         image 1 ┘

torchrun --nproc-per-node 4 examples/image_text.py     four processes
python examples/image_text.py                          the same training on one, with the same losses
"""

import os

import torch
from torch import Tensor, nn
from torch.nn import functional

import rota
from rota import spmd

NUM_RANKS, NUM_MICROBATCHES, NUM_STEPS = 4, 4, 40
SIZE, WIDTH, HIDDEN = 4, 32, 64
EDGES = [(0, 1), (2, 3), (1, 4), (3, 4)]

torch.set_default_dtype(torch.float64)
data = torch.Generator().manual_seed(1)  # of its own: a pipeline draws from the global one for dropout


class Match(nn.Module):
    """A hidden layer over both vectors, an equal part of it on each rank of `group`; without a group all on one."""

    def __init__(self, group: spmd.Group) -> None:
        super().__init__()
        whole = nn.Linear(2 * WIDTH, HIDDEN), nn.Linear(HIDDEN, 2, bias=False)
        self.group, size = group, HIDDEN // (group.size() if group else 1)
        mine = slice(group.rank() * size, (group.rank() + 1) * size) if group else slice(None)
        self.up = nn.Parameter(whole[0].weight[mine].detach().clone())
        self.down = nn.Parameter(whole[1].weight[:, mine].detach().clone())

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        """Two times (batch, width) -> logits (batch, 2), the same on all ranks."""
        both = spmd.copy_to_ranks(torch.cat([text, image], 1), self.group)
        hidden = functional.gelu(functional.linear(both, self.up))
        return spmd.sum_over_ranks(functional.linear(hidden, self.down), self.group)


def make_stages(group: spmd.Group) -> rota.Stages:
    torch.manual_seed(0)
    text = nn.Sequential(nn.Embedding(2 * SIZE, WIDTH), nn.Flatten()), nn.Linear(2 * WIDTH, WIDTH)
    image = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()), nn.Sequential(nn.Flatten(), nn.LazyLinear(WIDTH))
    image[1](image[0](torch.zeros(1, 1, SIZE, SIZE)))  # now the lazy layer knows its size
    return rota.Stages([*text, *image, Match(group)], EDGES, inputs={0: "words", 2: "pixels"})


def make_batch() -> tuple[dict[str, Tensor], Tensor]:
    """One bright pixel, the words for its row and column, and whether these are true; half of them are not."""
    n = 64
    row, column = torch.randint(SIZE, (2, n), generator=data)
    true = torch.randint(2, (n,), generator=data)
    pixels = torch.zeros(n, 1, SIZE, SIZE)
    pixels[torch.arange(n), 0, row, column] = 1
    told = torch.where(true.bool(), column, (column + torch.randint(1, SIZE, (n,), generator=data)) % SIZE)
    return {"words": torch.stack([row, SIZE + told], 1), "pixels": pixels}, true


def train_on_one_process() -> None:
    stages = make_stages(group=None)
    optimizer = torch.optim.Adam((parameter for _, parameter in stages.named_parameters()), lr=1e-2)
    for step in range(NUM_STEPS):
        batch, targets = make_batch()
        loss = functional.cross_entropy(stages.run(batch), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.9f}")


def train_on_four() -> None:
    costs = rota.Costs.uniform(5, forward_us=100, backward_us=200, edges=EDGES)
    placement = rota.place(costs, rota.Cluster.uniform(NUM_RANKS), [0, 1, 2, 3, range(NUM_RANKS)])
    plan = rota.schedules.gpipe(placement, NUM_MICROBATCHES)
    stages = make_stages(spmd.group(range(NUM_RANKS)))
    with rota.Pipeline(stages, plan, functional.cross_entropy) as pipeline:
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=1e-2)
        for step in range(NUM_STEPS):
            loss = pipeline.step(*make_batch())
            optimizer.step()
            optimizer.zero_grad()
            if pipeline.rank == 0:
                print(f"step {step}: loss {loss:.9f}")


if __name__ == "__main__":
    train_on_four() if "RANK" in os.environ else train_on_one_process()
