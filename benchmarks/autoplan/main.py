"""Does `rota autoplan` recommend the same plan again and again? The demo's GPT on two processes.

python benchmarks/autoplan/main.py [--runs 10] [--time-limit 30]

Each run is `rota autoplan` in a process of its own, which profiles the model again; links are measured once and kept.
Then steps of all plans that were recommended are run in turn. Results are added to result.json, beside this file: with
--runs 2 it can be called several times.
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
from rota.demo.model import GPT, NUM_BYTES, loss_fn
from rota.planning.step_times import StepTimes
from rota.planning.trials import Trial, run_trials

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
    """One run of autoplan: its plan, what it says of the step, and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        command = [sys.executable, "-m", "rota", "autoplan", __file__, "--ranks", "2", "--batch", str(BATCH_ROWS)]
        began_s = time.monotonic()
        given = ["--time-limit", f"{time_limit_s:g}", "-o", str(path)]
        done = subprocess.run([*command, *given], capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        says = [line for line in lines if " per step" in line or "Trial steps" in line or "one process" in line]
        return {"plan": path.read_text(), "says": says, "seconds": round(time.monotonic() - began_s, 1)}


def name_of(plan: rota.Plan) -> str:
    """The plan in words: equal names mean equal orders, cuts, rows and replicas."""
    usage = plan.usage
    assert usage is not None
    first = " ".join(map(str, plan.orders[0][:6]))
    sizes = f"{plan.num_microbatches} x {usage.microbatch_rows} rows"
    return f"{plan.num_ranks} x {usage.num_replicas}, layers {list(usage.num_layers)}, {sizes}, {first} …"


def measured(plans: dict[str, rota.Plan]) -> dict[str, StepTimes]:
    """Steps of each plan; all take turns."""
    trials = []
    for plan in plans.values():
        assert plan.usage is not None
        batch = make_batch(plan.usage.microbatch_rows)
        stages = rota.split(make_model(), plan.num_stages, plan.cuts, example=batch[0][:1])
        trials.append(Trial(plan, stages, *batch))
    return dict(zip(plans, run_trials(trials, loss_fn, make_optimizer, 15.0), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=30.0)
    given = parser.parse_args()
    runs: list[dict[str, Any]] = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
    for _ in range(given.runs):
        runs.append(recommended(given.time_limit))
        print(f"{name_of(rota.Plan.from_json(runs[-1]['plan']))}: {runs[-1]['seconds']} s", flush=True)
        for line in runs[-1]["says"]:
            print(f"    {line.strip()}", flush=True)
    plans = {name_of(plan): plan for plan in (rota.Plan.from_json(run["plan"]) for run in runs)}
    steps = measured(plans)
    table = {name: {"median_us": of.median_us, "spread": round(of.spread, 4)} for name, of in steps.items()}
    RESULT.write_text(json.dumps({"runs": runs, "measured": table}, indent=1) + "\n")
    for name, row in table.items():
        count = sum(name_of(rota.Plan.from_json(run["plan"])) == name for run in runs)
        print(
            f"{count} of {len(runs)}: {name}: {row['median_us'] / 1000:.1f} ms, middle half within {row['spread']:.1%}"
        )


if __name__ == "__main__":
    main()
