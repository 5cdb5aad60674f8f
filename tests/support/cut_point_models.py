"""Models with CutPoints whose forward returns the loss, and the same training without any of ours."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rota.compat.varuna import CutPoint
from support.plain_gpt import WIDTH, Block

VOCABULARY, LENGTH, NUM_BLOCKS = 23, 5, 4
BATCH_SIZE, CHUNK_SIZE, NUM_STEPS, MAX_NORM = 12, 2, 4, 0.7
#: By this order of names a weight keeps its first one.
SHARED = [("language_model.embedding.word_embeddings.weight", "lm_head_weight"), ("position.weight", "out_position")]


class GPT(nn.Module):
    """GPT-like; word and position embeddings are used again at the end, as parameters of their own.

    It reads the mask, the temperature and the labels where they are needed, in whatever stage that is.
    """

    def __init__(self, as_list: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.language_model = nn.ModuleDict({"embedding": nn.ModuleDict()})
        self.language_model.embedding["word_embeddings"] = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(NUM_BLOCKS))
        cut_points = [CutPoint() for _ in range(NUM_BLOCKS)]
        self.cutpoints = cut_points if as_list else nn.ModuleList(cut_points)
        self.final = nn.LayerNorm(WIDTH)
        self.lm_head_weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.out_position = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None, temperature: float = 1.0) -> Tensor:
        x = self.language_model["embedding"]["word_embeddings"](ids) + self.position.weight
        for i in range(NUM_BLOCKS):
            x = self.cutpoints[i](x)
            x = self.blocks[i](x, mask)
        logits = functional.linear(self.final(x) + self.out_position, self.lm_head_weight) / temperature
        return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def batch(step: int, rows: int = BATCH_SIZE) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 + step)
    ids, labels = torch.randint(VOCABULARY, (2, rows, LENGTH), generator=generator)
    causal = torch.full((LENGTH, LENGTH), -torch.inf).triu(1).expand(rows, -1, -1)
    return {"ids": ids, "labels": labels, "mask": causal, "temperature": 2.0}


def part_of(whole: dict[str, Any], replica: int, num_replicas: int) -> dict[str, Any]:
    """A replica's part of a batch."""
    return {
        name: value.chunk(num_replicas)[replica] if isinstance(value, Tensor) and value.dim() else value
        for name, value in whole.items()
    }


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    weights: dict[str, Tensor]


def tied(model: GPT, num_pairs: int) -> GPT:
    """As PyTorch ties weights: one object under both names."""
    if num_pairs > 0:
        model.lm_head_weight = model.language_model["embedding"]["word_embeddings"].weight
    if num_pairs > 1:
        model.out_position = model.position.weight
    return model


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def train_serially(num_pairs: int, num_steps: int = NUM_STEPS) -> Trained:
    model = tied(GPT(), num_pairs)
    optimizer = optimizer_of(model.parameters())
    losses, norms, evaluated = [], [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        losses.append(loss.item())
        optimizer.step()
        with torch.no_grad():
            evaluated.append(model.eval()(**batch(50 + step, rows=6)).item())
        model.train()
    return Trained(losses, norms, evaluated, {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)})
