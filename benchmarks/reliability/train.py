"""What is trained, in a folder of its own that has `options.json`, an `Options`. See `deaths` for what goes wrong.

The first process writes a line to `losses` for each step: its number, its loss to the last bit, its samples, when it
was done; and a line to `starts` for each start: when it was begun, had joined the others, and had its state. At the
end of the training, process N writes a line to `commits-N` for each step: whether it was committed, when its optimizer
began, which is when all processes have agreed (monotonic), and how many seconds the commit took.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import rota

sys.path.insert(0, str(Path(__file__).parent))

from deaths import Deaths

STARTED_S = time.monotonic()
BATCHES_PER_EPOCH = 40


class Options(NamedTuple):
    """Of a training; `num_steps` is where it ends, `dp` the replicas, `num_workers` those of the loader.

    `inputs`: the folder with the first weights, and with the samples, `samples`. None: each process draws all of them,
    or with `is_on_meta` only the weights of its own stages. `commits`: the share of steps that are committed, drawn.
    """

    num_steps: int = 10**9
    num_layers: int = 4
    width: int = 32
    rows: int = 32
    dp: int = 1
    num_workers: int = 0
    save_every: int | None = 20
    asynchronous: bool = False
    evaluate_every: int | None = None
    pause_s: float = 0.0
    inputs: str | None = None
    is_on_meta: bool = False
    commits: float = 1.0


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """With noise of their own each time, and their numbers."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return (self._rows[number] + 0.1 * torch.rand(self._rows.shape[1])).to(torch.get_default_dtype()), number


def samples_of(options: Options) -> torch.Tensor:
    """All samples without noise, as they are drawn or in a file that is mapped."""
    num_samples = BATCHES_PER_EPOCH * options.rows
    if options.inputs is None:
        return torch.randn(num_samples, options.width, dtype=torch.float64)
    file = str(Path(options.inputs, "samples"))
    return torch.from_file(file, size=num_samples * options.width, dtype=torch.float64).view(num_samples, options.width)


def model_of(options: Options) -> nn.Sequential:
    """The whole model."""
    width = options.width
    dtype = torch.float64 if width < 1000 else torch.float32
    layers = [
        nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.Tanh(), nn.Dropout(0.1))
        for _ in range(options.num_layers)
    ]
    return nn.Sequential(*layers)


def main(folder: Path) -> None:
    options = Options(**json.loads((folder / "options.json").read_text()))
    torch.manual_seed(0)
    if options.width < 1000:
        torch.set_default_dtype(torch.float64)
    is_on_meta = options.is_on_meta or options.inputs is not None
    with rota.meta_init() if is_on_meta else nullcontext():
        model = model_of(options)
    plan = rota.given_plan(folder / "plan.json")
    data = Samples(samples_of(options))
    deaths = Deaths(folder)
    deaths.before_joining()
    mesh = rota.mesh(pp=plan.num_ranks, dp=options.dp)
    stages = rota.split(model, plan.num_stages)
    if options.inputs:
        rota.load_pretrained(stages, rota.local_stages(plan, mesh), options.inputs)
    elif options.is_on_meta:
        rota.materialize(stages, rota.local_stages(plan, mesh))
    with rota.Pipeline(stages, plan, nn.functional.mse_loss, mesh=mesh) as pipeline:
        joined_s = time.monotonic()
        deaths.watch(pipeline)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        checkpoints = rota.Checkpoints(
            folder / "run", pipeline, optimizer, scheduler, asynchronous=options.asynchronous
        )
        commits = timed_commits(checkpoints, optimizer, options.commits)
        batch_size = options.rows // options.dp
        loader = DataLoader(data, batch_size, sampler=pipeline.sampler(data), num_workers=options.num_workers)
        is_first = pipeline.rank == pipeline.replica == 0
        has_state = False
        for step, (x, numbers) in checkpoints.steps(loader, num_epochs=10**6, save_every=options.save_every):
            if step >= options.num_steps:
                break
            if is_first and not has_state:
                _append(folder / "starts", f"{STARTED_S} {joined_s} {time.monotonic()}")
            has_state = True
            deaths.of_step(step, optimizer)
            if options.evaluate_every and step % options.evaluate_every == 0:
                pipeline.evaluate(x, x.flip(1))
            loss = pipeline.step(x, x.flip(1))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if is_first:
                samples = ",".join(map(str, numbers.tolist()))
                _append(folder / "losses", f"{step} {loss.hex()} {samples} {time.monotonic()}")
            time.sleep(options.pause_s)
    (folder / f"commits-{os.environ['RANK']}").write_text("\n".join(commits))


def timed_commits(checkpoints: rota.Checkpoints, optimizer: torch.optim.Optimizer, share: float) -> list[str]:
    """The lines for `commits-N`, as they come. The same steps are committed on all processes."""
    commit, agreed_s, found = checkpoints.commit, [0.0], []
    optimizer.register_step_pre_hook(lambda *_: agreed_s.append(time.monotonic()))

    def timed(step: int, **extra: Any) -> None:
        begun_s = time.perf_counter()
        is_committed = random.Random(step).random() < share
        if is_committed:
            commit(step, **extra)
        found.append(f"{is_committed:d} {agreed_s[-1]} {time.perf_counter() - begun_s}")

    checkpoints.commit = timed  # type: ignore[method-assign]
    return found


def _append(file: Path, line: str) -> None:
    """In one write, so that a killed process leaves no half line."""
    with file.open("a") as opened:
        opened.write(f"{line}\n")


if __name__ == "__main__":
    main(Path.cwd())
