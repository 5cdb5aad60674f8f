"""A small T5 learns to write dates: "Friday, 1 March 2024" becomes "2024-03-01". Bytes are its tokens, as in ByT5.

rota plan 1f1b --ranks 2 --microbatches 4 -o plan.json
rota run plan.json examples/encoder_decoder.py     or with a number of steps after it, 300 without

Needs `transformers`: pip install 'rota[examples]'
"""

import sys
from datetime import date, timedelta

import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

import rota

NUM_STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
SIZES = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}

tokenizer = ByT5Tokenizer()
days = [date(1900, 1, 1) + timedelta(days=i) for i in range(70_000)]


def encode(rows: list[date]):
    """The model's keyword arguments: input_ids of different lengths with their attention_mask, and labels."""
    batch = tokenizer([f"{day:%A, %-d %B %Y}" for day in rows], padding=True, return_tensors="pt")
    return batch | {"labels": tokenizer([day.isoformat() for day in rows], return_tensors="pt")["input_ids"]}


def loss_fn(output, labels):
    right = output.logits.argmax(-1) == labels
    loss = functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    return {"loss": loss, "accuracy": (right.sum(), right.numel())}


def main():
    torch.manual_seed(0)  # the same weights on every rank
    model = T5ForConditionalGeneration(T5Config(**SIZES, vocab_size=len(tokenizer), decoder_start_token_id=0))
    plan, mesh = rota.given_plan(), rota.mesh()
    stages = rota.split(model.train(), plan.num_stages, example=encode(days[:2]))
    stages.to(rota.local_device(), rota.local_stages(plan, mesh))  # a GPU if there is one for each process
    with rota.Pipeline(stages, plan, loss_fn, mesh=mesh) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
        sampler = pipeline.sampler(days)  # the same rows on both ranks
        loader = DataLoader(days, batch_size=32, sampler=sampler, collate_fn=encode, drop_last=True)
        for step, batch in zip(range(NUM_STEPS), loader, strict=False):
            loss = pipeline.step(batch, batch["labels"])
            pipeline.clip_grad_norm_(1.0)  # of the whole model
            optimizer.step()
            optimizer.zero_grad()
            if pipeline.rank == pipeline.replica == 0 and step % 10 == 0:
                print(f"step {step}: loss {loss:.3f}, right characters {pipeline.metrics['accuracy']:.0%}")


if __name__ == "__main__":
    main()
