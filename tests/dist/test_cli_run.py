"""`rota run` and `rota demo` as a user types them, in processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rota import Cluster, Costs, Plan, Timeline, place, simulate
from rota.schedules import NAMED

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)


def rota(folder: Path, *arguments: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "rota", *arguments, timeout_s=timeout_s)


def blocks_of(markdown: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", markdown.read_text(), flags=re.DOTALL)


def test_the_readme_does_what_it_says(tmp_path: Path) -> None:
    script, measuring = blocks_of(ROOT / "README.md", "python")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "measure.py").write_text(measuring)
    outputs = {}
    for command in re.findall(r"^    (rota|python) (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE):
        module = ["-m", "rota"] if command[0] == "rota" else []
        done = run(tmp_path, *module, *command[1].split())
        assert done.returncode == 0, done.stderr
        outputs[command[1].split()[0]] = done.stdout
    assert list(outputs) == ["plan", "run", "compare", "measure.py", "schedules", "bound"]
    assert re.search(r"loss \d\.\d{3}", outputs["run"])
    assert "slower ops" in outputs["compare"]
    assert "measuring 4 stages, all ranks at once" in outputs["measure.py"]
    figures = dict(re.findall(r"^[▸ ] (\w+) +\d +(\d[\d.]* (?:µs|ms)) ", outputs["schedules"], flags=re.MULTILINE))
    assert figures.keys() == NAMED.keys() - {"forward_only"}, outputs["schedules"]
    assert Timeline.from_json((tmp_path / "measured.json").read_text()).plan.num_microbatches == 8
    costs = Costs.from_json((tmp_path / "costs.json").read_text())
    assert Plan.from_json((tmp_path / "plan.json").read_text()).placement == place(costs, Cluster.uniform(4))


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
    assert written == {"costs.json", "plan.csv", "plan.json", "timeline.json", "timeline.html", "plan.png"}
    plan = Plan.from_json((tmp_path / "out" / "plan.json").read_text())
    assert Plan.from_csv((tmp_path / "out" / "plan.csv").read_text(), plan.placement) == plan
    assert Timeline.from_json((tmp_path / "out" / "timeline.json").read_text()).plan == plan
    assert f"{simulate(plan).makespan_us:,}" in done.stdout


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that work in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text())
    return found


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(tmp_path: Path, signal_number: signal.Signals) -> None:
    assert rota(tmp_path, "plan", "gpipe", "--ranks", "2", "--microbatches", "4", "-o", "plan.json").returncode == 0
    body = "import time; sys.stdout.write('begun\\n'); sys.stdout.flush(); time.sleep(100)"
    (tmp_path / "train.py").write_text(SCRIPT.format(body=body))
    command = [sys.executable, "-m", "rota", "run", "plan.json", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        launcher.send_signal(signal_number)
        code = launcher.wait(20)
        told = launcher.stderr.read()
    if signal_number is not signal.SIGKILL:
        assert "Traceback" not in told
        assert told.count("\n") == 1
        assert code == (130 if signal_number is signal.SIGINT else 1)
    deadline = time.monotonic() + 10
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(tmp_path) == []


def test_pipelines_of_two_plans_in_one_script(tmp_path: Path) -> None:
    body = (
        "other = rota.Pipeline(stages, rota.schedules.forward_only(plan.placement.forward_only(), 2), None);"
        "pipeline.step(torch.zeros(4, 2), torch.zeros(4, 2)); other.step(torch.zeros(4, 2));"
        "pipeline.close(); other.close()"
    )
    assert rota(tmp_path, "plan", "gpipe", "--ranks", "2", "--microbatches", "4", "-o", "plan.json").returncode == 0
    (tmp_path / "train.py").write_text(SCRIPT.format(body=body))
    done = rota(tmp_path, "run", "--timeline", "measured.json", "plan.json", "train.py")
    assert done.returncode == 0, done.stderr
    assert Timeline.from_json((tmp_path / "measured.json").read_text()).plan.num_microbatches == 4


def test_a_timeline_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    assert rota(tmp_path, "plan", "gpipe", "--ranks", "2", "--microbatches", "4", "-o", "plan.json").returncode == 0
    (tmp_path / "train.py").write_text("print('started')")
    done = rota(tmp_path, "run", "--timeline", "nowhere/t.json", "plan.json", "train.py")
    assert done.returncode == 2
    assert "cannot write nowhere/t.json" in done.stderr
    assert "started" not in done.stdout
