"""Does `rota autoplan` recommend the same plan again and again? The demo's GPT on two processes.

python benchmarks/autoplan/main.py [--runs 10] [--time-limit 30] [--add]

Each run is `rota autoplan` in a process of its own, which profiles the model again; links are measured once before, and
kept. Then steps of all plans that were recommended are run in turn. result.json, beside this file, has the runs so far,
and is written after each of them. A call begins a new series, unless --add continues the one in result.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rota
from rota.core.text import count_text
from rota.demo.model import GPT, NUM_BYTES, loss_fn
from rota.planning.choosing import StepTimes, difference
from rota.planning.trials import Trial, run_trials
from rota.profiling import links_of_this_machine

BATCH_ROWS, LENGTH = 32, 64
RESULT = Path(__file__).with_name("result.json")

__all__ = ["loss_fn"]  # this file is its own MODEL.py


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(length=LENGTH)


def make_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(NUM_BYTES, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


def recommended(time_limit_s: float) -> dict[str, Any]:
    """One run of autoplan: its plan, the spread that it states and from how many rounds, and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        command = [sys.executable, "-m", "rota", "autoplan", __file__, "--ranks", "2", "--batch", str(BATCH_ROWS)]
        began_s = time.monotonic()
        given = ["--time-limit", f"{time_limit_s:g}", "-o", str(path), "--json"]
        done = subprocess.run([*command, *given], stdout=subprocess.PIPE, text=True, check=True)
        answer = json.loads(done.stdout)
        return {
            "plan": path.read_text(),
            "schedule": answer["best"]["schedule"],
            "step_us": answer["best"]["step_us"],
            "spread": answer["tolerance"],
            "num_rounds": answer["num_rounds"],
            "one_process_us": answer["one_process_us"],
            "remarks": answer["remarks"],
            "seconds": round(time.monotonic() - began_s, 1),
        }


def name_of(plan: rota.Plan) -> str:
    """The plan in words: equal names mean equal orders, cuts, rows and replicas."""
    usage = plan.usage
    assert usage is not None
    first = " ".join(map(str, plan.orders[0][:6]))
    sizes = f"{plan.num_microbatches} x {usage.microbatch_rows} rows"
    return f"{plan.num_ranks} x {usage.num_replicas}, layers {list(usage.num_layers)}, {sizes}, {first} …"


def plan_of(run: dict[str, Any]) -> rota.Plan:
    return rota.Plan.from_json(run["plan"])


def measured(plans: dict[str, rota.Plan]) -> dict[str, StepTimes]:
    """Steps of each plan; all take turns."""
    trials = []
    for plan in plans.values():
        assert plan.usage is not None
        batch = make_batch(plan.usage.microbatch_rows)
        stages = rota.split(make_model(), plan.num_stages, plan.cuts, example=batch[0][:1])
        trials.append(Trial(plan, stages, *batch))
    return dict(zip(plans, run_trials(trials, loss_fn, make_optimizer, 30.0), strict=True))


def missed(runs: list[dict[str, Any]], steps: dict[str, StepTimes]) -> list[str]:
    """The runs whose plan differs from one that another run recommends by the spread that they state, or by more."""
    found = []
    for number, run in enumerate(runs, 1):
        mine = name_of(plan_of(run))
        apart = max(abs(difference(steps[mine], theirs).times - 1) for theirs in steps.values())
        if apart and apart >= run["spread"]:
            found.append(f"run {number} states {run['spread']:.1%}, and its plan's steps differ by {apart:.1%}")
    return found


def report(runs: list[dict[str, Any]], steps: dict[str, StepTimes]) -> None:
    """Print which plans were recommended how often, how far their steps are apart, and whether the claim is met."""
    fastest = min(steps.values(), key=lambda of: of.median_us)
    for name, of in steps.items():
        count = sum(name_of(plan_of(run)) == name for run in runs)
        times, spread, num_rounds = difference(of, fastest)
        beside = "" if of is fastest else f"; {times - 1:+.1%} ± {spread:.1%} in {count_text(num_rounds, 'round')}"
        print(
            f"{count} of {len(runs)}: {name}: {of.median_us / 1000:.1f} ms, interquartile range {of.spread:.1%}{beside}"
        )
    spreads = sorted(run["spread"] for run in runs)
    rounds = sorted(run["num_rounds"] for run in runs)
    print(f"stated spreads {spreads[0]:.1%} to {spreads[-1]:.1%}, from {rounds[0]} to {rounds[-1]} rounds each")
    failures = missed(runs, steps)
    print("\n".join([f"The claim is {'missed' if failures else 'met'} by these {len(runs)} runs", *failures]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--add", action="store_true", help="add to the runs in result.json instead of replacing them")
    given = parser.parse_args()
    runs: list[dict[str, Any]] = []
    if given.add and RESULT.exists():
        before = json.loads(RESULT.read_text())
        if before.get("time_limit_s") != given.time_limit:
            parser.error(
                f"result.json has runs with another time limit, {before.get('time_limit_s')} s; leave --add out"
            )
        runs = before["runs"]
    links_of_this_machine(2)  # kept for a week: else the first run would have less time than the others
    series: dict[str, Any] = {"time_limit_s": given.time_limit, "runs": runs}
    for _ in range(given.runs):
        runs.append(run := recommended(given.time_limit))
        RESULT.write_text(json.dumps(series, indent=1) + "\n")
        print(
            f"run {len(runs)}: {run['schedule']}, {name_of(plan_of(run))}: {run['step_us'] / 1000:.1f} ms, "
            f"stated spread {run['spread']:.1%} from {count_text(run['num_rounds'], 'round')}; {run['seconds']} s",
            flush=True,
        )
    steps = measured({name_of(plan): plan for plan in map(plan_of, runs)})
    series["measured"] = {name: {"steps_us": of.steps_us, "rounds_us": of.rounds_us} for name, of in steps.items()}
    RESULT.write_text(json.dumps(series, indent=1) + "\n")
    report(runs, steps)


if __name__ == "__main__":
    main()
