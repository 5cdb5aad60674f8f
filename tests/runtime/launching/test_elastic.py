"""A training that loses ranks, is asked to end, and goes on: by the undisturbed run's losses, to the bit."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from support import ROOT, elastic_training
from support.commands import output_of
from support.elastic_training import NUM_STAGES, NUM_STEPS, ON_TWO, PLAN, undisturbed
from support.pool import Pool

pytestmark = pytest.mark.dist

SCRIPT = str(Path(elastic_training.__file__))


def environment(folder: Path, **more: str) -> dict[str, str]:
    (folder / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), **more}


def rota_run(folder: Path, *options: str, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rota", "run", *options, "plan.json", SCRIPT, str(NUM_STEPS), *arguments]
    return subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=200)


def told(folder: Path) -> list[tuple[int, float, Any]]:
    """Each step, its loss and the number of ranks or its samples, as they were done: some again after a checkpoint."""
    return [tuple(json.loads(line)) for line in (folder / "losses").read_text().splitlines()]


def assert_nothing_left(folder: Path) -> None:
    assert not [path for path in (folder / "run").iterdir() if not re.fullmatch(r"step-\d+|\.rota\.lock", path.name)]
    of_torch = ("torchinductor_", "torchelastic_")
    assert not [path for path in (folder / "tmp").iterdir() if not path.name.startswith(of_torch)]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert (process / "cwd").readlink() != folder, (process / "cmdline").read_text()
        except OSError:
            continue  # it has ended, or is somebody else's


@pytest.mark.faults
def test_a_training_that_is_disturbed_again_and_again(pool: Pool, tmp_path: Path) -> None:
    """Killed, broken and asked to end under one command; asked by the launcher under the next, on 2 ranks; finished."""
    expected = dict(pool.run(NUM_STAGES, undisturbed, PLAN)[0])
    faults = [(3, 1, "SIGKILL"), (5, 2, "raise"), (7, 3, "SIGUSR1"), (9, 0, "launcher SIGTERM")]
    (tmp_path / "faults.json").write_text(json.dumps(faults))
    (tmp_path / "plan.json").write_text(PLAN.to_json())

    first = rota_run(tmp_path, "--max-restarts", "1")
    assert first.returncode == 0, first.stderr
    lines = [line for line in first.stderr.splitlines() if line.startswith(("rota run: ", "rota: training"))]
    run = tmp_path / "run"
    assert lines[:2] == [
        "rota run: rank 1 ended with SIGKILL: restart 1 of 1",
        f"rota: training resumes from {run}/step-2",
    ]
    assert lines[2:] == [  # step-4 is newer than all that was there at the first restart
        "rota run: rank 2 ended with exit code 1: restart 1 of 1",
        f"rota: training resumes from {run}/step-4",
    ]
    assert "ValueError: broken on purpose" in first.stderr
    assert [step for step, _, _ in told(tmp_path)] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 7]
    assert (run / "step-8").exists()

    (tmp_path / "plan.json").write_text(ON_TWO.to_json())
    second = rota_run(tmp_path)
    assert second.returncode == 143, second.stderr
    assert "rota run: SIGTERM: all ranks have ended after the step that was running\n" in second.stderr
    assert (run / "step-10").exists()
    third = rota_run(tmp_path)
    assert third.returncode == 0, third.stderr
    assert [(step, ranks) for step, _, ranks in told(tmp_path)[10:]] == [(8, 2), (9, 2), (10, 2), (11, 2)]
    for step, loss, ranks in told(tmp_path):
        assert loss == (expected[step] if ranks == NUM_STAGES else pytest.approx(expected[step], abs=1e-10))
    assert_nothing_left(tmp_path)


@pytest.mark.faults
def test_ranks_go_on_while_the_launcher_is_stopped(pool: Pool, tmp_path: Path) -> None:
    """As by Ctrl-Z. A rank that dies meanwhile is noticed when the launcher goes on."""
    expected = dict(pool.run(NUM_STAGES, undisturbed, PLAN)[0])
    (tmp_path / "faults.json").write_text(json.dumps([(3, 1, "launcher SIGSTOP"), (7, 2, "SIGKILL")]))
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    options = ["--max-restarts", "1", "plan.json", SCRIPT, str(NUM_STEPS)]
    command = [sys.executable, "-m", "rota", "run", *options]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE, text=True) as run:
        try:
            losses = tmp_path / "losses"
            while not losses.exists() or losses.read_text().count("\n") < 7:
                assert run.poll() is None
                time.sleep(0.01)
            state = Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[0]
            run.send_signal(signal.SIGCONT)
            _, stderr = run.communicate(timeout=200)
        finally:
            run.kill()
    assert run.returncode == 0, stderr
    assert state == "T"
    assert "rota run: rank 2 ended with SIGKILL: restart 1 of 1\n" in stderr
    assert [step for step, *_ in told(tmp_path)] == [*range(7), *range(6, NUM_STEPS)]
    assert {(step, loss) for step, loss, _ in told(tmp_path)} == {*expected.items()}
    assert_nothing_left(tmp_path)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The paths of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="rota-test-") as name:
        yield Path(name)


@pytest.mark.faults
def test_no_sample_is_lost_or_seen_twice(short_folder: Path) -> None:
    """Killed in epochs of a shuffled loader with workers, also in their first step; then ended, and begun again."""
    faults = [(2, 0, "SIGKILL"), (5, 3, "raise"), (8, 2, "SIGUSR1"), (11, 1, "SIGKILL")]
    seen_in = {}
    for name, of_run, num_commands in (("undisturbed", [], 1), ("disturbed", faults, 2)):
        folder = short_folder / name
        folder.mkdir()
        (folder / "plan.json").write_text(PLAN.to_json())
        (folder / "faults.json").write_text(json.dumps(of_run))
        for _ in range(num_commands):
            done = rota_run(folder, "--max-restarts", "2", arguments=["epochs"])
            assert done.returncode == 0, done.stderr
        seen_in[name] = told(folder)
        assert_nothing_left(folder)
    expected = seen_in["undisturbed"]
    assert seen_in["disturbed"] == expected
    for epoch in range(3):
        seen = [number for _, _, numbers in expected[5 * epoch : 5 * epoch + 5] for number in numbers]
        assert sorted(seen) == [*range(elastic_training.NUM_SAMPLES)]


@pytest.mark.parametrize("name", ["steps", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("own", "dp"))])
def test_the_page_does_what_it_says(pool: Pool, tmp_path: Path, name: str) -> None:
    """Without a restart: those are tested in test_supervisor, and here with killed ranks."""
    page = (ROOT / "docs" / "elastic.md").read_text()
    script, own_loop, *_ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    commands = re.findall(r"^    (rota (?:plan|run --max).*)$", page, flags=re.MULTILINE)
    if name == "dp":
        commands = ["rota plan 1f1b --ranks 2 --microbatches 8 -o plan.json", "rota run --mesh dp=2 plan.json train.py"]
    before_loop, loop, _ = script.partition("    for step, (inputs")
    assert loop
    (tmp_path / "train.py").write_text(script if name != "own" else before_loop + indent(own_loop, "    "))
    assert len(commands) == 2
    for command in commands:
        output_of(pool, tmp_path, command.replace(" --max-restarts 3", ""))
    assert {path.name for path in (tmp_path / "run").glob("step-*")} == {"step-30", "step-40", "step-50"}
