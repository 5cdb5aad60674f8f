"""How far are the figures that autoplan shows from the run? Three models on two processes, five plans each.

python benchmarks/prediction_two_processes/main.py [MODEL …] [--repeat 5] [--seconds 110]

Before the run, steps of each plan are tried as autoplan tries them, and the plan is simulated with its ops as they ran
there. Then each plan is trained by `rota run`'s machinery, in new processes, twice: all plans in turn, then all again.
The plans are made once and kept in plans.json, the results in result.json, both beside this file. A call that --seconds
ends is continued by the next one; --report prints the results that there are.
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
from typing import Any

import torch
from torch import nn

import rota
from rota.calibration import calibrated
from rota.planning.choosing import StepTimes
from rota.planning.trials import Trial, run_trials
from rota.profiling import links_of_this_machine
from rota.profiling.devices import OtherPrograms
from rota.runtime.launching.launch import launch
from rota.schedules import NAMED

RESULT, PLANS = Path(__file__).with_name("result.json"), Path(__file__).with_name("plans.json")
NUM_MICROBATCHES, WARM_UP, NUM_STARTS = 8, 3, 2
TRIALS_S, STEPS_S, LEAST_STEPS = 30.0, 2.0, 8
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


def plans_of(name: str) -> dict[str, rota.Plan]:
    """One plan per schedule; made in the first call for this model."""
    kept: dict[str, dict[str, str]] = json.loads(PLANS.read_text()) if PLANS.exists() else {}
    if name not in kept:
        cluster = links_of_this_machine(2).cluster
        kept[name] = {schedule: plan_of(name, schedule, cluster).to_json() for schedule in SCHEDULES}
        PLANS.write_text(json.dumps(kept))
    return {schedule: rota.Plan.from_json(text) for schedule, text in kept[name].items()}


def plan_of(name: str, schedule: str, cluster: rota.Cluster) -> rota.Plan:
    family = NAMED[schedule]
    stages = rota.split(chain(MODELS[name][0]), 2 * family.stages_per_rank)
    uniform = family.place(family.adapted(rota.Costs.uniform(len(stages))), cluster)
    costs = rota.profile(
        stages,
        *batch_of(name, 1),
        loss_fn,
        split_backward=family.backward == "split",
        options=rota.StageProfileOptions(repeats=3, ranks=[uniform.ranks_of(stage)[0] for stage in uniform.stages]),
    )
    return family(family.place(costs, cluster), NUM_MICROBATCHES)


def work(name: str, folder: str) -> None:
    """On each process of a run."""
    torch.set_num_threads(1)
    plan = rota.given_plan()
    with rota.Pipeline(rota.split(chain(MODELS[name][0]), plan.num_stages), plan, loss_fn) as pipeline:
        optimizer, batch = make_optimizer(pipeline.parameters()), batch_of(name, NUM_MICROBATCHES)

        def ends_s(count: int) -> list[float]:
            """When each of so many steps has ended: nothing waits between them."""
            ends = []
            for _ in range(count):
                pipeline.step(*batch)
                optimizer.step()
                optimizer.zero_grad()
                ends.append(time.perf_counter())
            return ends

        warm = ends_s(WARM_UP)
        count = torch.tensor(max(LEAST_STEPS, int(STEPS_S / (warm[-1] - warm[-2]))))
        torch.distributed.broadcast(count, 0)
        ends = ends_s(1 + int(count))  # the first of them may have waited for the other process
        if pipeline.rank == 0:
            took_us = [round(1e6 * (end - begin)) for begin, end in pairwise(ends)]
            Path(folder, "steps.json").write_text(json.dumps(took_us))


def trained(plan: rota.Plan, name: str) -> list[int]:
    """The steps of one run in µs."""
    with tempfile.TemporaryDirectory() as folder:
        launch(plan, __file__, [name, "--folder", folder])
        steps_us: list[int] = json.loads(Path(folder, "steps.json").read_text())
    return steps_us


def compared(name: str) -> list[dict[str, Any]]:
    plans = plans_of(name)
    trials = [
        Trial(plan, rota.split(chain(MODELS[name][0]), plan.num_stages), *batch_of(name, 1)) for plan in plans.values()
    ]
    runs: dict[str, list[list[int]]] = {schedule: [] for schedule in plans}
    disturbed = dict.fromkeys(plans, 0.0)
    print(f"{name}: trying {len(trials)} plans", file=sys.stderr, flush=True)
    shown = run_trials(trials, loss_fn, make_optimizer, TRIALS_S)
    print(f"{name}: training", file=sys.stderr, flush=True)
    for _ in range(NUM_STARTS):
        for schedule, plan in plans.items():
            others = OtherPrograms()
            runs[schedule].append(trained(plan, name))
            disturbed[schedule] = max(disturbed[schedule], others.num_cores())
    rows = []
    for (schedule, plan), steps in zip(plans.items(), shown, strict=True):
        as_run = calibrated(*steps.timelines)
        placement = replace(plan.placement, tasks=as_run.tasks, step_ends=as_run.step_ends)
        measured = StepTimes(tuple(us for training in runs[schedule] for us in training))
        rows.append(
            {
                "plan": schedule,
                "simulated_us": rota.simulate(replace(plan, placement=placement)).makespan_us,
                "shown_us": steps.median_us,
                "shown_spread": round(steps.spread, 4),
                "num_steps_tried": len(steps.steps_us),
                "measured_us": measured.median_us,
                "measured_spread": round(measured.spread, 4),
                "others_cores": [round(steps.missing_cores, 3), round(disturbed[schedule], 3)],
                "starts_us": [StepTimes(tuple(training)).median_us for training in runs[schedule]],
            }
        )
    return rows


def report(name: str, all_rows: list[list[dict[str, Any]]]) -> str:
    """The table of the README, then which plan was picked in each run, and how many figures came true."""
    lines = ["| " + " | ".join([name, *(f"run {number}" for number, _ in enumerate(all_rows, 1))]) + " |"]
    lines.append("|---" * (1 + len(all_rows)) + "|")
    for of_plan in zip(*all_rows, strict=True):
        lines.append("| " + " | ".join([of_plan[0]["plan"], *map(cell, of_plan)]) + " |")
    lines.append("")
    num_right = 0
    for number, rows in enumerate(all_rows, 1):
        picked = min(rows, key=lambda row: row["shown_us"])
        best = min(rows, key=lambda row: row["measured_us"])
        behind = picked["measured_us"] / best["measured_us"] - 1
        is_right = behind <= max(picked["measured_spread"], best["measured_spread"])
        num_right += is_right
        lines.append(
            f"run {number}: picked {picked['plan']}, the fastest was {best['plan']}: {behind:.1%} behind, "
            f"{'right or within the spread' if is_right else 'WRONG'}"
        )
    every = [row for rows in all_rows for row in rows]
    lines.append(
        f"{name}: {sum(abs(off(row)) <= 0.07 for row in every)} of {len(every)} steps within 7%, "
        f"{sum(map(is_met, every))} within the limit that applies to them; "
        f"picked right or within the spread: {num_right} of {len(all_rows)}"
    )
    return "\n".join(lines) + "\n"


def cell(row: dict[str, Any]) -> str:
    """Predicted and measured step in ms, their difference, in bold if beyond the limit, and spread."""
    difference = f"{off(row):+.1%}" if is_met(row) else f"**{off(row):+.1%}**"
    times = f"{row['shown_us'] / 1000:.1f} / {row['measured_us'] / 1000:.1f}"
    return f"{times}, {difference}, {row['measured_spread']:.0%}"


def off(row: dict[str, Any]) -> float:
    return float(row["shown_us"] / row["measured_us"] - 1)


def is_met(row: dict[str, Any]) -> bool:
    return abs(off(row)) <= (0.05 if row["measured_spread"] < 0.03 else 0.07)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS])
    parser.add_argument("--repeat", type=int, default=1, help="until there are so many results of each model")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after this time")
    parser.add_argument("--plan", action="store_true", help="make the plans, and stop")
    parser.add_argument("--report", action="store_true", help="print the results that there are")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of a process of the run
    given = parser.parse_args()
    if given.folder is not None:
        work(given.models[0], given.folder)
        return
    began_s = time.monotonic()
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in given.models:
        plans_of(name)
    for number in range(0 if given.plan or given.report else given.repeat):
        for name in given.models:
            if len(results.setdefault(name, [])) <= number and time.monotonic() < began_s + given.seconds:
                results[name].append(compared(name))
                RESULT.write_text(json.dumps(results, indent=1) + "\n")
    for name in given.models:
        if results.get(name):
            print(report(name, results[name]), flush=True)


if __name__ == "__main__":
    main()
