"""A ResNet on scikit-learn's digits (8 x 8 pixels), in an order that Rota's search proves the best for these costs.

rota plan search --ranks 4 --microbatches 4 --forward-us 100 --backward-us 200 --split-backward -o plan.json
rota run plan.json examples/resnet_digits.py     four processes
python examples/resnet_digits.py                 the same training on one, with the same losses

BatchNorm takes the statistics of a micro-batch, so one process goes through its batch in the same micro-batches.
Needs scikit-learn: pip install 'rota[examples]'
"""

import os
from collections.abc import Iterable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import rota

NUM_MICROBATCHES, NUM_STEPS, BATCH = 4, 40, 64

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = torch.Generator().manual_seed(1)  # of its own: a pipeline draws from the global one for dropout


class Block(nn.Module):
    """Two convolutions beside a way around them; `stride` 2 halves the image."""

    def __init__(self, num_in: int, num_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(num_out)
        self.conv2, self.bn2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out)
        around = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))
        self.around = around if (num_in, stride) != (num_out, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.around(x))


model = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
    Block(8, 8),
    Block(8, 16, stride=2),
    Block(16, 16),
    Block(16, 32, stride=2),
    nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
)
digits = load_digits()
images, labels = torch.tensor(digits.images)[:, None] / 16, torch.tensor(digits.target)
(seen, others), (seen_labels, other_labels) = images.split([1497, 300]), labels.split([1497, 300])


def make_batch() -> tuple[Tensor, Tensor]:
    chosen = torch.randint(len(seen), (BATCH,), generator=data)
    return seen[chosen], seen_labels[chosen]


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.8)


def tell_accuracy(outputs: list[Tensor]) -> None:
    """With BatchNorm's running statistics, on images that were not trained on."""
    right = torch.cat(outputs).argmax(1) == other_labels
    print(f"accuracy on {len(others)} others: {right.double().mean():.3f}")


def train_on_one_process() -> None:
    optimizer = make_optimizer(model.parameters())
    for step in range(NUM_STEPS):
        total = 0.0
        for x, y in zip(*(part.chunk(NUM_MICROBATCHES) for part in make_batch()), strict=True):
            loss = functional.cross_entropy(model(x), y) / NUM_MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {total:.9f}")
    model.eval()
    tell_accuracy([model(others)])


def train_on_many() -> None:
    plan = rota.given_plan()
    stages = rota.split(model, plan.num_stages, plan.cuts)
    stages.to(rota.local_device(), rota.local_stages(plan))  # a GPU if there is one for each process
    with rota.Pipeline(stages, plan, functional.cross_entropy) as pipeline:
        optimizer = make_optimizer(pipeline.parameters())
        for step in range(NUM_STEPS):
            loss = pipeline.step(*make_batch())
            optimizer.step()
            optimizer.zero_grad()
            if pipeline.rank == 0:
                print(f"step {step}: loss {loss:.9f}")
        outputs = pipeline.forward(others, outputs=pipeline.rank == 0)
        if outputs:
            tell_accuracy([output.cpu() for output in outputs])


if __name__ == "__main__":
    train_on_many() if "RANK" in os.environ else train_on_one_process()
