"""`rota verify` and `rota run --verify`: exact or not, on a plan's own processes."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rota
from cli.test_cli import Capsys
from rota.cli import main
from rota.core.plan import Usage
from support.commands import output_of
from support.pool import Pool

pytestmark = pytest.mark.dist

MODEL = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh(), {extra}nn.Linear(8, 4))

def make_batch(rows):
    return torch.randn(rows, 8), torch.randn(rows, 4)

loss_fn = nn.functional.mse_loss
"""

BY_HAND = """
import torch
from torch import nn
import rota

class Wrong(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0.1

def make_unsplit():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

def make_model():
    first, tanh, last = make_unsplit()
    wrong = Wrong(8, 4)
    wrong.load_state_dict(last.state_dict())
    return rota.Stages([first, tanh, wrong])

def make_batch(rows):
    return torch.randn(rows, 8), torch.randn(rows, 4)

loss_fn = nn.functional.mse_loss
"""

TRAIN = """
import torch
import rota
from model import loss_fn, make_batch, make_model

plan = rota.given_plan()
torch.manual_seed(0)
stages = rota.split(make_model(), plan.num_stages, plan.cuts)
with rota.Pipeline(stages, plan, loss_fn) as pipeline:
    for _ in range(2):
        print("loss", pipeline.step(*make_batch(8)), flush=True)
"""


@pytest.fixture
def plan(tmp_path: Path) -> str:
    costs = rota.Costs.uniform(2, 10, 20)
    path = tmp_path / "plan.json"
    made = rota.schedules.one_f_one_b(rota.place(costs, rota.Cluster.uniform(2)), 4)
    path.write_text(made.to_json())
    return str(path)


def test_an_exact_model_and_the_report_as_json(plan: str, tmp_path: Path, capfd: Capsys) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL.format(extra=""))
    assert main(["verify", plan, str(model), "--rows", "2", "--json"]) == 0
    told = capfd.readouterr()
    report = json.loads(told.out)
    assert report["exact"]
    assert [each["dtype"] for each in report["comparisons"]] == ["float64", "float32"]
    assert {each["stage"] for each in report["comparisons"][0]["parameters"]} == {0, 1}
    assert report["notes"] == ["dropout was switched off in both models"]
    assert "rota verify: float64: the unsplit model" in told.err


def on_one_rank(folder: Path, **usage: Any) -> str:
    costs = rota.Costs.uniform(2, 10, 20)
    planned = rota.schedules.gpipe(rota.place(costs, rota.Cluster.uniform(1), (0, 0)), 2)
    (folder / "plan.json").write_text(replace(planned, **usage).to_json())
    return str(folder / "plan.json")


@pytest.fixture
def on_pool(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are processes of the pool, and plan.json their plan."""

    def launch(_: rota.Plan, script: str, arguments: list[str], *__: object) -> None:
        output_of(pool, tmp_path, shlex.join(["rota", "run", "plan.json", script, *arguments]))
        if not Path(arguments[0]).with_name("report.json").exists():
            raise rota.PipelineError("no rank has written the report")

    monkeypatch.setattr("rota.planning.verify_on_ranks.launch", launch)


@pytest.mark.usefixtures("on_pool")
def test_a_missing_gradient_is_in_the_report(tmp_path: Path, capfd: Capsys) -> None:
    plan, model = on_one_rank(tmp_path), tmp_path / "model.py"
    detached = BY_HAND.replace("super().forward(x) + 0.1", "nn.functional.linear(x, self.weight.detach(), self.bias)")
    model.write_text(detached)
    assert main(["verify", plan, str(model), "--json"]) == 1
    told = capfd.readouterr()

    def refuse(number: str) -> None:
        raise AssertionError(f"JSON has no {number}")

    (comparison,) = json.loads(told.out, parse_constant=refuse)["comparisons"]
    assert {"name": "2.weight", "stage": 1, "relative": "inf"} in comparison["parameters"], told.err


def trained(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`rota run`, which forks its ranks, in a process that has one thread."""
    command = [sys.executable, "-m", "rota", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_run_verifies_before_its_first_step(plan: str, tmp_path: Path) -> None:
    model, script = tmp_path / "model.py", tmp_path / "train.py"
    model.write_text(MODEL.format(extra="nn.BatchNorm1d(8), "))
    script.write_text(TRAIN)
    told = trained("--verify", plan, str(script))
    assert told.returncode == 1
    assert "loss" not in told.stdout
    assert "rota: before the first step: NOT exact" in told.stderr
    assert "the split model is not exact, so nothing is trained" in told.stderr


@pytest.mark.usefixtures("on_pool")
def test_a_plan_whose_cuts_the_model_lacks_is_wrong_input(tmp_path: Path, capfd: Capsys) -> None:
    plan, model = on_one_rank(tmp_path, usage=Usage(("blocks.4",), 1)), tmp_path / "model.py"
    model.write_text(MODEL.format(extra=""))
    assert main(["verify", plan, str(model)]) == 2
    told = capfd.readouterr().err  # Triton may add lines of its own
    assert f"rota verify: error: {model} cannot be cut as the plan says: " in told
    assert "Traceback" not in told


def test_refusals(plan: str, tmp_path: Path, capsys: Capsys) -> None:
    model = tmp_path / "model.py"
    model.write_text("make_model = None")
    assert main(["verify", plan, str(model)]) == 2
    assert "defines no function make_model" in capsys.readouterr().err
