"""A small GPT that learns the source code of Python's standard library, byte by byte.

`rota autoplan`, `rota profile` and `rota verify` read this file. It is a template for your own.
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

NUM_BYTES, LENGTH, WIDTH, NUM_BLOCKS, NUM_HEADS = 256, 64, 128, 8, 4


class Embedding(nn.Module):
    """Maps bytes (batch, length) to vectors of them and their positions."""

    def __init__(self, width, length):
        super().__init__()
        self.byte, self.position = nn.Embedding(NUM_BYTES, width), nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, tokens):
        return self.byte(tokens) + self.position


class Block(nn.Module):
    """A transformer block with pre-norm: attention and MLP, each added to its input."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Maps bytes (batch, length) to logits of the next byte (batch, length, 256)."""

    def __init__(self, num_blocks=NUM_BLOCKS, width=WIDTH, num_heads=NUM_HEADS, length=LENGTH):
        super().__init__()
        self.embed = Embedding(width, length)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_BYTES)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model():
    torch.manual_seed(0)  # the same weights on every rank
    return GPT()


FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
TEXT = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in FILES)), dtype=torch.uint8)


def make_batch(rows):
    """Return bytes and, for each of them, the next byte: both (rows, LENGTH)."""
    starts = torch.randint(len(TEXT) - LENGTH - 1, (rows, 1))
    samples = TEXT[starts + torch.arange(LENGTH + 1)].long()
    return samples[:, :-1], samples[:, 1:]


def loss_fn(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
