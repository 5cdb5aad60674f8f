"""`rota run` and `rota demo` as a user types them, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rota import Plan, Timeline, simulate

ROOT = Path(__file__).parents[2]


def rota(folder: Path, *arguments: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rota", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)


def blocks_of(markdown: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", markdown.read_text(), flags=re.DOTALL)


def test_the_readme_does_what_it_says(tmp_path: Path) -> None:
    script, measuring = blocks_of(ROOT / "README.md", "python")
    (tmp_path / "train.py").write_text(script)
    commands = re.findall(r"^    rota (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["plan", "run", "compare"]
    outputs = []
    for command in commands:
        done = rota(tmp_path, *command.split())
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert re.search(r"loss \d\.\d{3}", outputs[1])
    assert "slower ops" in outputs[2]
    measured = Timeline.from_json((tmp_path / "measured.json").read_text())
    assert measured.plan == Plan.from_json((tmp_path / "plan.json").read_text())

    setup = script.partition("plan = rota.given_plan()")[0]
    setup += "stages = rota.split(model, 4)\ninputs, targets = torch.randn(4, 64), torch.randint(10, (4,))\n"
    (tmp_path / "measure.py").write_text(setup + measuring)
    done = subprocess.run([sys.executable, "measure.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "measuring 4 stages, all ranks at once" in done.stdout


SCRIPT = """
import sys, torch, rota
from torch import nn
plan = rota.given_plan()
stages = rota.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), plan.num_stages)
with rota.Pipeline(stages, plan, nn.functional.mse_loss) as pipeline:
    {body}
"""


def run_script(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    assert rota(folder, "plan", "gpipe", "--ranks", "2", "--microbatches", "4", "-o", "plan.json").returncode == 0
    (folder / "train.py").write_text(SCRIPT.format(body=body))
    return rota(folder, "run", "plan.json", "train.py", "hello")


def test_a_batch_that_does_not_divide_is_told_in_a_line(tmp_path: Path) -> None:
    done = run_script(tmp_path, "pipeline.step(torch.zeros(10, 2), torch.zeros(10, 2))")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "inputs has 10 rows" in done.stderr
    assert "give 8 or 12 rows" in done.stderr
    assert "train.py:7" in done.stderr


def test_all_ranks_end_when_one_fails(tmp_path: Path) -> None:
    done = run_script(tmp_path, "sys.exit(3) if pipeline.rank == 1 else pipeline.step(torch.zeros(4, 2))")
    assert done.returncode == 1
    assert "rank 1 ended with exit code 3 first" in done.stderr


def test_arguments_reach_the_script(tmp_path: Path) -> None:
    body = (
        "loss = pipeline.step(torch.zeros(4, 2), torch.zeros(4, 2)); sys.stdout.write(f'{sys.argv[1:]} {loss >= 0}\\n')"
    )
    done = run_script(tmp_path, body)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['hello'] True") == 2


def test_a_refused_plan_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    (tmp_path / "cycle.csv").write_text("0B0,0F0\n1F0,1B0\n")
    done = rota(tmp_path, "run", "cycle.csv", "train.py")
    assert done.returncode == 1
    assert "started" not in done.stdout
    assert "cycle" in done.stderr


@pytest.mark.timeout(180)
def test_demo(tmp_path: Path) -> None:
    done = rota(tmp_path, "demo", "--steps", "12", "-o", "out", timeout_s=170)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses[-1] < losses[0] - 1
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"costs.json", "plan.csv", "plan.json", "timeline.json", "plan.png"}
    plan = Plan.from_json((tmp_path / "out" / "plan.json").read_text())
    assert Plan.from_csv((tmp_path / "out" / "plan.csv").read_text(), plan.placement) == plan
    assert Timeline.from_json((tmp_path / "out" / "timeline.json").read_text()).plan == plan
    assert f"{simulate(plan).makespan_us:,}" in done.stdout
