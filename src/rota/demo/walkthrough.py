"""`rota demo`: the commands that a user types for a model, run on a small GPT."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rota.core.errors import PipelineError
from rota.runtime.environment import num_cores

_HERE = Path(__file__).parent
_BATCH_ROWS = 32
_PLANNING_S = 12


def run_demo(folder: str, num_steps: int) -> None:
    """Plan, train, compare and explain a small GPT in `folder`, and say what to do next. Raises PipelineError."""
    num_ranks = min(max(num_cores(), 2), 4)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # one core per rank
    for name in ("model.py", "train.py"):
        shutil.copyfile(_HERE / name, Path(folder, name))
    sizes = f"--ranks {num_ranks} --pipeline {num_ranks} --batch {_BATCH_ROWS} --rows 4 --exportable"
    commands = {
        "Plan: measure the model, find the fastest plan, try it": (
            f"autoplan model.py {sizes} --time-limit {_PLANNING_S} --force -o plan.json"
        ),
        "Train as planned": f"run --force --timeline measured.json plan.json train.py --steps {num_steps}",
        "Compare: predicted vs. measured": "compare plan.json measured.json --force -o timeline.html",
        "Explain: why ranks were idle": "explain measured.json",
    }
    for number, (title, command) in enumerate(commands.items(), 1):
        print(f"\n{number}. {title}\n\n$ rota {command}\n", flush=True)
        code = subprocess.call([sys.executable, "-m", "rota", *command.split()], cwd=folder, env=environment)
        if code:
            raise PipelineError(f"`rota {command}` in {folder} ended with exit code {code}; see above")
    print(f"\nThe files are in {folder}/. Next:")
    print(f"  open {folder}/timeline.html in a browser: the plan above the measured step")
    print(f"  put your own model into {folder}/model.py, and run the commands above")
    print("  rota doctor: test this machine")
