"""A GPT, a ResNet and a model of two branches, small, each with a batch and a loss: what profiles are tested on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rota import CutPoint
from rota.demo import model as gpt


class Case(NamedTuple):
    model: nn.Module
    batch: Tensor
    target: Tensor
    loss_fn: Callable[[Any, Any], Tensor]


class Block(nn.Module):
    """Two convolutions around which the input is added; its last operation writes in place."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second_norm(self.second(self.relu(self.first_norm(self.first(x)))))
        out: Tensor = self.relu(y + self.shortcut(x))
        return out


def resnet() -> nn.Module:
    stem = (nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 10))
    return nn.Sequential(*stem, Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1), *head)


class CutGPT(nn.Module):
    """The demo's GPT, with CutPoints."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.whole = gpt.GPT(num_blocks, width)
        self.cuts = [CutPoint() for _ in range(num_blocks - 1)]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.whole.embed(tokens)
        for i, block in enumerate(self.whole.blocks):
            x = block(x)
            if i < len(self.cuts):
                x = self.cuts[i](x)
        logits: Tensor = self.whole.head(self.whole.norm(x))
        return logits


class TwoBranches(nn.Module):
    """Both branches and their sum read what the stem makes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.slim = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
        self.cuts = [CutPoint() for _ in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.cuts[0](torch.relu(self.stem(x)))
        wide = self.cuts[1](self.wide(h))
        slim = self.cuts[2](self.slim(h))
        out: Tensor = self.head(self.cuts[3](wide + slim + h))
        return out


#: The models by name.
MAKE: dict[str, Callable[[], nn.Module]] = {"gpt": lambda: CutGPT(3, 32), "resnet": resnet, "two branches": TwoBranches}


def case(name: str) -> Case:
    torch.manual_seed(0)
    model = MAKE[name]()
    if name == "gpt":
        return Case(model, *torch.randint(0, 256, (2, 5, 64)).unbind(), gpt.loss_fn)
    if name == "resnet":
        return Case(model, torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,)), functional.cross_entropy)
    return Case(model, torch.randn(8, 16), torch.randn(8, 4), functional.mse_loss)
