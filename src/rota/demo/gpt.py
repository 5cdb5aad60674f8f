"""A small byte-level GPT with a CutPoint between blocks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from rota.models import CutPoint

NUM_BYTES = 256


class Block(nn.Module):
    """A transformer block with pre-norm: attention and MLP, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """Maps bytes (batch, length) to logits of the next byte (batch, length, 256)."""

    def __init__(self, num_blocks: int = 8, width: int = 128, num_heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.cuts = [CutPoint() for _ in range(num_blocks - 1)]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits; `tokens` are int64 from 0 to 255."""
        x = self.embed(tokens) + self.position
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i < len(self.cuts):
                x = self.cuts[i](x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy per byte in nats; `logits` (batch, length, 256), `targets` (batch, length)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
