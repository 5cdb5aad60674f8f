"""The script that the demo runs on every rank: data, model, loop. It is a template for your own.

rota run plan.json train.py --steps 60
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path

import torch

import rota
from rota.demo.gpt import GPT, loss_fn

LENGTH, ROWS = 64, 32


def make_stages(num_stages: int) -> rota.Stages:
    """Return the same model, split in the same way, on every rank."""
    torch.manual_seed(0)
    return rota.split(GPT(length=LENGTH), num_stages)


class Corpus:
    """Random samples of text that every machine has: the sources of Python's standard library.

    The same seed gives the same samples.
    """

    def __init__(self, length: int, max_bytes: int = 4_000_000, seed: int = 0) -> None:
        self.length = length
        data = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            data += path.read_bytes()
            if len(data) >= max_bytes:
                break
        self.bytes = torch.frombuffer(data, dtype=torch.uint8)
        self._random = torch.Generator().manual_seed(seed)

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bytes and, for each of them, the next byte: both (rows, length), int64."""
        starts = torch.randint(len(self.bytes) - self.length - 1, (rows, 1), generator=self._random)
        samples = self.bytes[starts + torch.arange(self.length + 1)].long()
        return samples[:, :-1], samples[:, 1:]


class ProgressLine:
    """A progress bar in a terminal; a plain line now and then if output goes to a file."""

    def __init__(self, total: int, shown: bool = True) -> None:
        self._total, self._shown = total, shown
        self._done = 0
        self._start_s = time.monotonic()

    def show(self, status: str) -> None:
        """Count one more step, and show the progress."""
        self._done += 1
        if not self._shown:
            return
        elapsed_s = time.monotonic() - self._start_s
        left_s = elapsed_s / self._done * (self._total - self._done)
        filled = round(24 * self._done / self._total)
        line = (
            f"step {self._done:>4}/{self._total}  {'█' * filled}{'░' * (24 - filled)}  {status}  {left_s:3.0f} s left"
        )
        if sys.stdout.isatty():
            print(f"\r{line} ", end="", flush=True)
        elif self._done == 1 or self._done == self._total or self._done % max(self._total // 6, 1) == 0:
            print(line, flush=True)

    def finish(self) -> None:
        """End the line in a terminal."""
        if self._shown and sys.stdout.isatty():
            print(flush=True)


def main() -> None:
    """Train for `--steps` steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    plan = rota.given_plan()
    stages = make_stages(plan.num_stages)
    corpus = Corpus(LENGTH)  # the same seed on all ranks: each rank has every batch, and uses what its stages read
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
