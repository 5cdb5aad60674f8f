"""Plan and run of a GPT with uneven layers on two processes: autoplan's choice against 1F1B on equal layers.

python benchmarks/planning/two_processes.py [--steps 40]

The two plans take turns, step by step, in one run; medians count. The file is its own MODEL.py. First it is measured
whether two processes that compute at once are twice as fast as one: on a machine that is busy with something else they
are not, and nothing is judged. The link between them is measured too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import rota
from rota.demo.model import NUM_BYTES, Block
from rota.planning import Machine, autoplan
from rota.planning.autoplanning import usual_plan
from rota.planning.choosing import Contender
from rota.planning.confirmation import Training, confirm
from rota.planning.model_file import load_model_file, profile_file
from rota.profiling import links_of_this_machine
from rota.runtime.launching.launch import launch

WIDTH, LENGTH, BATCH_ROWS, ROWS = 192, 64, 32, (2, 4)
MLP_TIMES = (1, 1, 2, 2, 4, 4, 8, 12)  # how wide each block's MLP is
_ENOUGH = 1.8  # times the throughput of one process that two must have
_CALIBRATION_S = 3.0
_SHARE_OF_MODEL = 1.1  # that one rank has room for, activations included


class Uneven(nn.Module):
    """Bytes (batch, length) -> logits of the next byte; blocks ever wider, and a head of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BYTES, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 4) for _ in MLP_TIMES)
        for block, times in zip(self.blocks, MLP_TIMES, strict=True):
            block.mlp = nn.Sequential(nn.Linear(WIDTH, times * WIDTH), nn.GELU(), nn.Linear(times * WIDTH, WIDTH))
        self.cuts = [rota.CutPoint() for _ in MLP_TIMES]
        self.head = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, NUM_BYTES))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            x = cut(block(x))
        logits: torch.Tensor = self.head(x)
        return logits


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Uneven()


def make_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(NUM_BYTES, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


# --- two processes at once -------------------------------------------------------------------------------------------


def throughput(num_processes: int) -> float:
    """Matrix products a second, of all processes together."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes) as pool:
        pool.map(_products, [0.2] * num_processes, chunksize=1)  # warm: torch is loaded
        return sum(pool.map(_products, [_CALIBRATION_S] * num_processes, chunksize=1))


def _products(seconds: float) -> float:
    torch.set_num_threads(1)
    a = torch.randn(256, 256)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        a = a @ a / 256
        count += 1
    return count / (time.perf_counter() - began)


# --- the run ---------------------------------------------------------------------------------------------------------


def work(folder: str, num_steps: int) -> None:
    """On each process: steps of all plans in turn, each timed between two barriers, and what its other threads take."""
    torch.set_num_threads(1)
    plans = [rota.Plan.from_json(path.read_text()) for path in sorted(Path(folder).glob("*.plan"))]
    took: list[list[float]] = [[] for _ in plans]
    beside: list[list[float]] = [[] for _ in plans]
    pipelines, optimizers = [], []
    for plan in plans:
        replicas = plan.usage.num_replicas if plan.usage else 1
        mesh = rota.mesh(pp=plan.num_ranks, dp=replicas)
        stages = rota.split(make_model(), plan.num_stages, plan.cuts, example=make_batch(1)[0])
        pipelines.append(rota.Pipeline(stages, plan, loss_fn, mesh=mesh))
        optimizers.append(make_optimizer(pipelines[-1].parameters()))
    for _ in range(num_steps + 3):
        for i, (plan, pipeline, optimizer) in enumerate(zip(plans, pipelines, optimizers, strict=True)):
            batch = make_batch(BATCH_ROWS // (plan.usage.num_replicas if plan.usage else 1))
            torch.distributed.barrier()
            began, began_beside = time.perf_counter(), time.process_time() - time.thread_time()
            pipeline.step(*batch)
            optimizer.step()
            optimizer.zero_grad()
            torch.distributed.barrier()
            took[i].append(time.perf_counter() - began)
            beside[i].append(time.process_time() - time.thread_time() - began_beside)
    medians = torch.tensor([[median(times[3:]) for times in kind] for kind in (took, beside)], dtype=torch.float64)
    torch.distributed.all_reduce(medians[1])
    if torch.distributed.get_rank() == 0:
        Path(folder, "medians").write_text(json.dumps(medians.T.tolist()))
    for pipeline in reversed(pipelines):
        pipeline.close()


def run(plans: list[rota.Plan], num_steps: int) -> list[tuple[float, float]]:
    """For each, medians of a step: seconds, and seconds of CPU that the processes' other threads take."""
    with tempfile.TemporaryDirectory() as folder:
        for i, plan in enumerate(plans):
            Path(folder, f"{i}.plan").write_text(plan.to_json())
        launch(plans[0], __file__, ["--steps", str(num_steps), "--folder", folder])
        return [(took, beside) for took, beside in json.loads(Path(folder, "medians").read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of a process of the run
    given = parser.parse_args()
    if given.folder is not None:
        work(given.folder, given.steps)
        return
    gained = throughput(2) / throughput(1)
    print(f"two processes at once do {gained:.2f} times the work of one")
    judge = gained >= _ENOUGH
    model_file = load_model_file(__file__)
    profiles = profile_file(model_file, ROWS)
    limit_bytes = int(_SHARE_OF_MODEL * sum(profiles[ROWS[0]].static_bytes))  # so that it takes both ranks
    links = links_of_this_machine(2).cluster
    answer = autoplan(profiles, Machine(2, limit_bytes, links), BATCH_ROWS, time_limit_s=30)
    roomy = replace(answer.best.candidate, request=replace(answer.request, machine=Machine(2, None, links)))
    usual = usual_plan(replace(answer.best, candidate=roomy))  # which need not fit
    answer = confirm(replace(answer, usual=usual), Training(make_model(), make_batch, loss_fn, make_optimizer))
    print(answer.to_text())
    best, usual = answer.best, answer.usual
    if not isinstance(usual, Contender):
        sys.exit("1F1B on equal layers has no plan here: there is nothing to compare with")
    measured = run([best.plan, usual.plan], given.steps)
    for name, found, (took_s, beside_s) in zip(
        ("autoplan", "1F1B on equal layers"), (best, usual), measured, strict=True
    ):
        print(
            f"{name}: {found.makespan_us / 1000:.1f} ms planned, {took_s * 1000:.1f} ms measured; threads that move "
            f"messages take {beside_s * 1000:.0f} ms of CPU"
        )
    (best_s, _), (usual_s, _) = measured
    print(f"gain: {usual.makespan_us / best.makespan_us:.2f} predicted, {usual_s / best_s:.2f} measured")
    if not judge:
        print(f"not judged: below {_ENOUGH} the processes hold each other up; run it on a quiet machine")


if __name__ == "__main__":
    main()
