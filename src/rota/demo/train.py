"""The script that the demo runs on every rank; a template for your own.

rota run plan.json train.py --steps 60
"""

from __future__ import annotations

import argparse

import torch

import rota
from rota.demo.corpus import Corpus
from rota.demo.gpt import GPT, loss_fn
from rota.demo.progress import ProgressLine

LENGTH, ROWS = 64, 32


def make_stages(num_stages: int) -> rota.Stages:
    """The same model, cut the same way, on every rank."""
    torch.manual_seed(0)
    return rota.split(GPT(length=LENGTH), num_stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    plan = rota.given_plan()
    stages = make_stages(plan.num_stages)
    corpus = Corpus(LENGTH)  # the same seed on all ranks: each has every batch, and uses what its stages read
    with rota.Pipeline(stages, plan, loss_fn) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=2e-3)
        progress = ProgressLine(steps, shown=pipeline.rank == 0)
        for _ in range(steps):
            loss = pipeline.step(*corpus.batch(ROWS))
            optimizer.step()
            optimizer.zero_grad()
            progress.show(f"loss {loss:.3f}")
        progress.finish()


if __name__ == "__main__":
    main()
