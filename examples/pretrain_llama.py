"""A small Llama, trained from scratch on the definitions in Python's standard library, with a tokenizer of its own.

rota plan 1f1b --ranks 2 --microbatches 4 -o plan.json
rota run plan.json examples/pretrain_llama.py     or with a number of steps after it, 200 without

Needs `transformers`: pip install 'rota[examples]'
"""

import os
import sys
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rota

NUM_STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_hidden_layers": 4}

files = sorted(Path(os.__file__).parent.glob("*.py"))
texts = [text for file in files for text in file.read_text("utf-8").split("\n\n\n")]  # functions and classes
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(texts[:1000], vocab_size=1024, special_tokens=["<pad>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>")
CONFIG = LlamaConfig(**SIZES, vocab_size=len(tokenizer), pad_token_id=0)


def encode(rows: list[str]):
    return tokenizer(rows, max_length=64, truncation=True, padding=True, return_tensors="pt")


def loss_fn(output, labels):
    """Sum and count, so that every token weighs the same, though texts and micro-batches differ in length."""
    logits, following = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(logits, following, reduction="sum"), (following != -100).sum()


def main():
    torch.manual_seed(0)  # the same weights on every rank; `pipeline.sampler` below gives them the same rows
    plan, mesh = rota.given_plan(), rota.mesh()
    stages = rota.split(LlamaForCausalLM(CONFIG), plan.num_stages, example=encode(texts[:2]))
    stages.to(rota.local_device(), rota.local_stages(plan, mesh))  # a GPU if there is one for each process
    with rota.Pipeline(stages, plan, loss_fn, mesh=mesh) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
        loader = DataLoader(texts, 16, sampler=pipeline.sampler(texts), collate_fn=encode, drop_last=True)
        for step, batch in zip(range(NUM_STEPS), loader, strict=False):
            loss = pipeline.step(batch, batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100))
            pipeline.clip_grad_norm_(1.0)  # of the whole model
            optimizer.step()
            optimizer.zero_grad()
            if pipeline.rank == pipeline.replica == 0 and step % 10 == 0:
                print(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
