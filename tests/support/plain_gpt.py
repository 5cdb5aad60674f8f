"""A GPT as torchtitan's models are, and a step of it by torchtitan's config and PyTorch alone: nothing of Rota."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional

WORDS, WIDTH, LENGTH = 17, 8, 6
FOUR = (  # parts of a GPT of six blocks
    ("tok_embeddings", "layers.0"),
    ("layers.1", "layers.2"),
    ("layers.3", "layers.4"),
    ("layers.5", "norm", "output"),
)


class Block(nn.Module):
    """Attention of one head, and an MLP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # one of k has no gradient, only noise for Adam
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.dropout(torch.softmax(q @ k.transpose(-1, -2) + mask, dim=-1) @ v)
        result: Tensor = x + self.mlp(x)
        return result


class GPT(nn.Module):
    """Words (batch, length) -> logits; passes over the modules that are not there.

    `marks`: what is called behind the blocks of these names.
    """

    def __init__(self, num_blocks: int = 6, marks: Mapping[str, Callable[[Tensor], Tensor]] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(num_blocks)})
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu(1), persistent=False)
        self.marks = dict(marks or {})
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for name, block in self.layers.items():
            h = block(h, self.mask)
            if name in self.marks:
                h = self.marks[name](h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(num_rows: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (num_rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return words[:, :-1], words[:, 1:]


def pruned(whole: nn.Module, names: list[str]) -> nn.Module:
    """A copy with the named modules alone: others are None, or gone from the dict that they are in."""
    model = copy.deepcopy(whole)
    for child, module in [*model.named_children()]:
        if isinstance(module, nn.ModuleDict):
            for entry in [*module]:
                if f"{child}.{entry}" not in names:
                    del module[entry]
        elif child not in names:
            setattr(model, child, None)
    return model


def step_by_files(rank: int, config_file: str, num_microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    """The micro-batches' losses, where they are made, and this rank's gradients by name."""
    config: dict[str, Any] = json.loads(Path(config_file).read_text())
    parts = config["pipeline_parallel_module_fqns_per_model_part"]
    num_ranks, num_parts = config["pipeline_parallel_degree"], len(parts)
    local = [*range(rank, num_parts, num_ranks)]
    if config["pipeline_parallel_schedule"] == "ZBVZeroBubble":
        local = [rank, num_parts - 1 - rank]
    whole = GPT()
    stages = [PipelineStage(pruned(whole, parts[s]), s, num_parts, torch.device("cpu")) for s in local]
    schedule = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss_fn)
    schedule._load_csv(config["pipeline_parallel_schedule_csv"])
    inputs, targets = batch_of(2 * num_microbatches)
    losses: list[Tensor] = []
    is_last = num_parts - 1 in local
    schedule.step(*[inputs] * (0 in local), target=targets if is_last else None, losses=losses if is_last else None)
    dist.barrier()
    named = [pair for stage in stages for pair in stage.submod.named_parameters()]
    return [loss.item() for loss in losses], {name: p.grad for name, p in named if p.grad is not None}
