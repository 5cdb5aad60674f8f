"""Hugging Face's GPT-2, unmodified: two replicas of a pipeline of two ranks, with two stages on each rank.

torchrun --nproc-per-node 4 examples/hf_gpt2.py     four processes
python examples/hf_gpt2.py                          the same training on one, with the same losses

Needs `transformers`: pip install 'rota[examples]'
"""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput

import rota

NUM_MICROBATCHES, NUM_STEPS, LENGTH = 4, 20, 16
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # for the same losses on one process and on four
SIZES = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 32, "n_layer": 4, "n_head": 4}

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
gpt = GPT2LMHeadModel(GPT2Config(**SIZES, **NO_DROPOUT, bos_token_id=None, eos_token_id=None))
text = torch.tensor(list(Path(__file__).read_bytes()))
data = torch.Generator().manual_seed(1)  # of its own: a pipeline draws from the global one for dropout


def make_batch() -> tuple[Tensor, Tensor]:
    """This file's bytes, and those that follow them."""
    starts = torch.randint(len(text) - LENGTH, (32, 1), generator=data)
    return text[starts + torch.arange(LENGTH)], text[starts + torch.arange(LENGTH) + 1]


def loss_fn(output: CausalLMOutput, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> tuple[AdamW, CosineAnnealingLR]:
    """Weights decay, biases and norms do not; the learning rate falls to zero."""
    weights, others = [], []
    for parameter in parameters:
        (weights if parameter.dim() > 1 else others).append(parameter)
    optimizer = AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    return optimizer, CosineAnnealingLR(optimizer, NUM_STEPS)


def train_on_one_process() -> None:
    optimizer, scheduler = make_optimizer(gpt.parameters())
    for step in range(NUM_STEPS):
        tokens, targets = make_batch()
        loss = loss_fn(gpt(tokens), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.9f}, norm {norm:.9f}")


def train_on_four() -> None:
    mesh = rota.mesh(pp=2, dp=2)
    stages = rota.split(gpt, 4, example=text[None, :LENGTH])  # one block each; the head is tied to the embedding
    costs = rota.Costs.uniform(4, forward_us=100, backward_us=200)
    plan = rota.schedules.interleaved_one_f_one_b(rota.interleaved(costs, rota.Cluster.uniform(2)), NUM_MICROBATCHES)
    with rota.Pipeline(stages, plan, loss_fn, mesh=mesh) as pipeline:
        optimizer, scheduler = make_optimizer(pipeline.parameters())
        for step in range(NUM_STEPS):
            mine = [part.chunk(pipeline.num_replicas)[pipeline.replica] for part in make_batch()]
            loss = pipeline.step(*mine)  # gradients are averaged over the replicas, the loss is the mean of both
            norm = pipeline.clip_grad_norm_(1.0)  # of the whole model
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if int(os.environ["RANK"]) == 0:
                print(f"step {step}: loss {loss:.9f}, norm {norm:.9f}")


if __name__ == "__main__":
    train_on_four() if "RANK" in os.environ else train_on_one_process()
