"""`rota run` and `rota demo` as a user types them, in processes of their own."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.test_cli import Capsys, run as run_here
from rota import Cluster, Costs, Plan, Timeline, place, simulate
from rota.schedules import NAMED
from support import ROOT
from support.commands import output_of
from support.faulty_training import processes_in, until
from support.pages import python_blocks
from support.parsing import options_of
from support.pool import Pool

pytestmark = pytest.mark.dist


def run(folder: Path, *arguments: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)


def rota(folder: Path, *arguments: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "rota", *arguments, timeout_s=timeout_s)


def blocks_of(markdown: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", markdown.read_text(), flags=re.DOTALL)


def test_the_readme_does_what_it_says(pool: Pool, tmp_path: Path) -> None:
    """With a smaller model, one size of micro-batch, and a link that is given: test_doctor measures one."""
    model, train = blocks_of(ROOT / "README.md", "python")
    assert '"n_embd": 192, "n_layer": 8' in model
    model = model.replace('"n_embd": 192, "n_layer": 8', '"n_embd": 48, "n_layer": 4')
    (tmp_path / "train.py").write_text(train.replace("range(1, 61)", "range(1, 7)").replace("step % 10", "step % 2"))
    (tmp_path / "model.py").write_text(model)
    outputs = {}
    for command in re.findall(r"^    rota (.*?)(?: +#.*)?$", (ROOT / "README.md").read_text(), flags=re.MULTILINE):
        words = command.replace("-o plan", "--rows 4 --link 20us,2GB/s --time-limit 6 -o plan").split()
        if words[0] in ("autoplan", "run"):
            done = rota(tmp_path, *words)
            assert done.returncode == 0, done.stderr
            outputs[words[0]] = done.stdout
        else:
            outputs[words[0]] = output_of(pool, tmp_path, f"rota {command}")
    assert list(outputs) == ["autoplan", "run", "compare", "explain"]
    assert re.search(r"^▸ .* MB$", outputs["autoplan"], flags=re.MULTILINE)
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d{3})", outputs["run"])]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "slower ops" in outputs["compare"]
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.usage.microbatch_rows * plan.num_microbatches * plan.usage.num_replicas == 32
    assert Timeline.from_json((tmp_path / "measured.json").read_text()).plan == plan


SCRIPT = """
import sys, torch, rota
from torch import nn
plan = rota.given_plan()
stages = rota.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), plan.num_stages)
with rota.Pipeline(stages, plan, nn.functional.mse_loss) as pipeline:
    {body}
"""


def write_plan(folder: Path) -> None:
    """plan.json: GPipe on 2 ranks."""
    plan = NAMED["gpipe"](place(Costs.uniform(2), Cluster.uniform(2)), 4)
    (folder / "plan.json").write_text(plan.to_json())


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capsys, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of `rota run …` in this process, which starts no other."""
    (folder / "train.py").write_text("print('started')")
    monkeypatch.chdir(folder)
    code, out, error = run_here(capfd, "run", *arguments)
    assert out == ""
    return code, error


def test_options_after_the_script_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capsys) -> None:
    """It is the script's: `rota run` does not take it."""
    passed_on: list[list[str]] = []

    def started(_: Plan, script: str, arguments: list[str], *__: object) -> None:
        passed_on.append(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr("rota.runtime.launching.launch.launch", started)
    write_plan(tmp_path)
    options = [option for option in options_of("run") if option != "--help"]
    assert {"--verify-microbatches", "--timeline"} < {*options}
    code, error = refused(tmp_path, monkeypatch, capfd, "plan.json", "train.py", *options)
    reported = [line.removeprefix("rota run: ").partition(" comes after the script")[0] for line in error.splitlines()]
    assert (code, reported, passed_on.pop()) == (130, [*options, "interrupted"], options)
    code, error = refused(tmp_path, monkeypatch, capfd, "plan.json", "train.py", "--timeline=x.json", "--steps")
    assert error.startswith("rota run: --timeline comes after the script")
    assert (code, error.count("\n"), passed_on.pop()) == (130, 2, ["--timeline=x.json", "--steps"])


def test_ctrl_c_before_there_is_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capsys) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt("no rank had made a rota.Pipeline")

    monkeypatch.setattr("rota.runtime.launching.launch.launch", interrupted)
    write_plan(tmp_path)
    code, error = refused(tmp_path, monkeypatch, capfd, "plan.json", "train.py")
    assert (code, error) == (130, "rota run: interrupted: no rank had made a rota.Pipeline\n")


@pytest.mark.sweep
def test_demo(tmp_path: Path) -> None:
    done = rota(tmp_path, "demo", "--steps", "12", "-o", "out")
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses[-1] < losses[0] - 1
    written = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert written == {"model.py", "train.py", "plan.json", "measured.json", "timeline.html"}
    plan = Plan.from_json((tmp_path / "out" / "plan.json").read_text())
    assert Timeline.from_json((tmp_path / "out" / "measured.json").read_text()).plan == plan
    assert f"{simulate(plan).makespan_us:,}" in done.stdout
    commands = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("$ rota ")]
    assert commands == ["autoplan", "run", "compare", "explain"]


@pytest.mark.parametrize(
    "signal_number",
    [signal.SIGINT, *(pytest.param(other, marks=pytest.mark.faults) for other in (signal.SIGTERM, signal.SIGKILL))],
)
def test_no_rank_outlives_the_launcher(tmp_path: Path, signal_number: signal.Signals) -> None:
    write_plan(tmp_path)
    body = "import time; sys.stdout.write('begun\\n'); sys.stdout.flush(); time.sleep(1000)"
    (tmp_path / "train.py").write_text(SCRIPT.format(body=body))
    command = [sys.executable, "-m", "rota", "run", "plan.json", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert [launcher.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        launcher.send_signal(signal_number)
        code = launcher.wait(150)
        words = launcher.stderr.read()
    if signal_number is not signal.SIGKILL:
        assert "Traceback" not in words
        assert words.count("\n") == 1
        assert code == 128 + signal_number, words
    assert until(lambda: processes_in(tmp_path) == [])


def test_arguments_the_device_and_pipelines_of_two_plans(tmp_path: Path) -> None:
    body = (
        "other = rota.Pipeline(stages, rota.schedules.forward_only(plan.placement.forward_only(), 2), None);"
        "pipeline.step(torch.zeros(4, 2), torch.zeros(4, 2)); other.step(torch.zeros(4, 2));"
        "pipeline.close(); other.close(); sys.stdout.write(f'{sys.argv[1:]} {rota.local_device()}\\n')"
    )
    write_plan(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.format(body=body))
    done = rota(tmp_path, "run", "--timeline", "measured.json", "--device", "cpu", "plan.json", "train.py", "hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['hello'] cpu\n") == 2
    assert Timeline.from_json((tmp_path / "measured.json").read_text()).plan.num_microbatches == 4


def test_the_page_on_meshes_does_what_it_says(pool: Pool, tmp_path: Path) -> None:
    """With two replicas and without, on the same batches."""
    page = ROOT / "docs" / "mesh.md"
    (tmp_path / "train.py").write_text(blocks_of(page, "python")[0])
    planning, running = re.findall(r"^    rota (.*)$", page.read_text(), flags=re.MULTILINE)
    output_of(pool, tmp_path, f"rota {planning}")
    (words,) = re.findall(r"^loss .*$", output_of(pool, tmp_path, f"rota {running}"), flags=re.MULTILINE)
    without = " ".join(word for word in running.split() if "mesh" not in word and "pp=" not in word)
    assert words in output_of(pool, tmp_path, f"rota {without}")


def test_a_mesh_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capsys) -> None:
    write_plan(tmp_path)
    code, error = refused(tmp_path, monkeypatch, capfd, "--mesh", "pp=3", "plan.json", "train.py")
    assert code == 2
    assert "--mesh pp=3: plan.json is for 2 ranks; leave pp out" in error


def test_a_training_goes_on_with_another_plan_as_the_docs_say(pool: Pool, tmp_path: Path) -> None:
    script, _ = blocks_of(ROOT / "docs" / "checkpoints.md", "python")
    (tmp_path / "train.py").write_text(script)
    both = Costs.uniform(2), Costs.uniform(2, weight_us=1)
    for name, costs, schedule in zip("ab", both, ("1f1b", "zb_h1"), strict=True):
        plan = NAMED[schedule](place(costs, Cluster.uniform(costs.num_stages)), 4)
        (tmp_path / f"{name}.json").write_text(plan.to_json())
    losses = []
    for arguments in ("--mesh dp=2 a.json", "b.json"):
        losses.append(float(output_of(pool, tmp_path, f"rota run {arguments} train.py 6")))
        listed = output_of(pool, tmp_path, "rota checkpoint ls run")
        assert [line.split()[0] for line in listed.splitlines()] == ["step-2", "step-4", "step-6"]
        shutil.rmtree(tmp_path / "run" / "step-6")  # so that the second run goes on at step 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_model_without_memory_trains_as_the_docs_say(pool: Pool, tmp_path: Path) -> None:
    training, *_ = python_blocks("memory.md#Models larger than a machine's memory")
    (tmp_path / "train.py").write_text(training)
    losses = []
    for num_ranks in (1, 2):
        plan = NAMED["1f1b"](place(Costs.uniform(num_ranks), Cluster.uniform(num_ranks)), 2)
        (tmp_path / "plan.json").write_text(plan.to_json())
        losses.append(float(output_of(pool, tmp_path, "rota run plan.json train.py")))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
