"""Do the figures that autoplan shows come true? Three models on two processes, five plans each.

python benchmarks/prediction_two_processes/main.py [MODEL …] [--steps 20]

Before the run, steps of each plan are tried as autoplan tries them, and the plan is simulated with its ops as they ran
there. Then each plan is trained by `rota run`'s machinery, in new processes. Results are added to result.json beside
this file, one entry per model and call.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

import rota
from rota.calibration import calibrated
from rota.planning.trials import Trial, run_trials
from rota.profiling import links_of_this_machine
from rota.runtime.launching.launch import launch
from rota.schedules import NAMED

RESULT = Path(__file__).with_name("result.json")
NUM_MICROBATCHES, WARM_UP = 8, 3
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zb_v")


def chain(widths: list[int]) -> nn.Sequential:
    """Linear layers with a GELU, of these widths."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)))


#: Widths of the layers, and rows of a micro-batch: long ops and small messages, the other way round, uneven layers.
MODELS = {
    "compute-bound": ([1024] * 9, 64),
    "message-bound": ([128] * 9, 1024),
    "uneven": ([256, 256, 512, 512, 1024, 1024, 2048, 2048, 1024], 64),
}


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def batch_of(name: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    widths, rows = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(count * rows, widths[0], generator=generator),
        torch.randn(count * rows, widths[-1], generator=generator),
    )


def plans_of(name: str, cluster: rota.Cluster) -> dict[str, tuple[rota.Plan, rota.Stages]]:
    made = {}
    for schedule in SCHEDULES:
        family = NAMED[schedule]
        stages = rota.split(chain(MODELS[name][0]), 2 * family.stages_per_rank)
        uniform = family.place(family.adapted(rota.Costs.uniform(len(stages))), cluster)
        ranks = [uniform.ranks_of(stage) for stage in uniform.stages]
        costs = rota.profile(
            stages,
            *batch_of(name, 1),
            loss_fn,
            ranks=[family_ranks[0] for family_ranks in ranks],
            split_backward=family.backward == "split",
            repeats=3,
        )
        made[schedule] = family(family.place(costs, cluster), NUM_MICROBATCHES), stages
    return made


def work(name: str, num_steps: int, folder: str) -> None:
    """On each process of a run."""
    torch.set_num_threads(1)
    plan = rota.given_plan()
    took: list[float] = []
    with rota.Pipeline(rota.split(chain(MODELS[name][0]), plan.num_stages), plan, loss_fn) as pipeline:
        optimizer, batch = make_optimizer(pipeline.parameters()), batch_of(name, NUM_MICROBATCHES)
        for _ in range(WARM_UP + num_steps):
            torch.distributed.barrier()
            began_s = time.perf_counter()
            pipeline.step(*batch)
            optimizer.step()
            optimizer.zero_grad()
            torch.distributed.barrier()
            took.append(time.perf_counter() - began_s)
        if pipeline.rank == 0:
            Path(folder, "steps.json").write_text(json.dumps(took[WARM_UP:]))


def measured_us(plan: rota.Plan, name: str, num_steps: int) -> tuple[float, float]:
    """The median step and its spread, in a run of its own."""
    with tempfile.TemporaryDirectory() as folder:
        launch(plan, __file__, [name, "--steps", str(num_steps), "--folder", folder])
        times = json.loads(Path(folder, "steps.json").read_text())
    first, _, third = quantiles(times, n=4, method="inclusive")
    return 1e6 * median(times), (third - first) / median(times)


def compared(name: str, num_steps: int) -> list[dict[str, Any]]:
    plans = plans_of(name, links_of_this_machine(2))
    trials = [Trial(plan, stages, *batch_of(name, 1)) for plan, stages in plans.values()]
    print(f"{name}: trying {len(trials)} plans", file=sys.stderr, flush=True)
    shown = run_trials(trials, loss_fn, make_optimizer, 20.0)
    rows = []
    for (schedule, (plan, _)), steps in zip(plans.items(), shown, strict=True):
        as_run = calibrated(*steps.timelines)
        placement = replace(plan.placement, tasks=as_run.tasks, step_ends=as_run.step_ends)
        print(f"{name}: training {schedule}", file=sys.stderr, flush=True)
        us, spread = measured_us(plan, name, num_steps)
        rows.append(
            {
                "plan": schedule,
                "predicted_us": rota.simulate(replace(plan, placement=placement)).makespan_us,
                "shown_us": steps.median_us,
                "shown_spread": round(steps.spread, 4),
                "measured_us": round(us),
                "measured_spread": round(spread, 4),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of a process of the run
    given = parser.parse_args()
    if given.folder is not None:
        work(given.models[0], given.steps, given.folder)
        return
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in given.models:
        rows = compared(name, given.steps)
        results.setdefault(name, []).append(rows)
        RESULT.write_text(json.dumps(results, indent=1) + "\n")
        print(f"| {name} | simulated by its ops, ms | shown before, ms | measured, ms | off | spread |")
        print("|---|---|---|---|---|---|")
        for row in rows:
            off = row["shown_us"] / row["measured_us"] - 1
            times = [f"{row[key] / 1000:.1f}" for key in ("predicted_us", "shown_us", "measured_us")]
            print(f"| {row['plan']} | {' | '.join(times)} | {off:+.1%} | {row['measured_spread']:.1%} |")
        picked = min(rows, key=lambda row: row["shown_us"])
        best = min(rows, key=lambda row: row["measured_us"])
        behind = picked["measured_us"] / best["measured_us"] - 1
        print(f"picked {picked['plan']}, the fastest was {best['plan']}: {behind:.1%} behind\n", flush=True)


if __name__ == "__main__":
    main()
