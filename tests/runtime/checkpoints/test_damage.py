"""What has happened to a folder of checkpoints since they were saved: damage, other jobs, and ends without a close."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from rota import Checkpoints, PipelineError
from rota.runtime.checkpoints import checkpoint_folder
from rota.runtime.checkpoints.checkpoint_folder import LOCK, locked
from support.checkpoint_runs import TWO, Training
from support.networks import refusal
from support.pool import Pool
from support.sampling import swept

pytestmark = pytest.mark.dist


def save_three(rank: int, folder: Path) -> None:
    with Training(TWO) as training:
        saver = training.checkpoints(folder)
        for step in (1, 2, 3):
            training.steps(range(step - 1, step))
            saver.save(step)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def flip_last(path: Path) -> None:
    """Of a rank's file, in a tensor."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def load_with_words(rank: int, folder: Path, step: int | None = None) -> tuple[int | None, str]:
    """The step, or None where none is loaded; and what was said, or the error."""
    training = Training(TWO)
    with training.pipeline as pipeline, redirect_stderr(StringIO()) as said:
        before = [p.detach().clone() for p in pipeline.parameters()]
        checkpoints = training.checkpoints(folder)
        try:
            found = checkpoints.load(step)
        except PipelineError as error:
            assert all(map(torch.equal, before, pipeline.parameters()))
            return None, str(error)
        assert training.scheduler.last_epoch == found.step
        assert all(state["step"] == found.step for state in training.optimizer.state.values())
        return found.step, said.getvalue()


DAMAGES: list[tuple[str, Callable[[Path], Any]]] = [
    ("rank-1.safetensors", flip_last),
    ("rank-1.safetensors", flip),
    ("rank-0.safetensors", truncate),
    ("rank-1.safetensors", Path.unlink),
    ("rota.json", flip),
    ("rota.json", lambda path: path.write_bytes(path.read_bytes()[:500])),
    ("rota.json", Path.unlink),
]


@pytest.fixture(scope="module")
def three(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three checkpoints; to be copied."""
    pool.run(2, save_three, folder := tmp_path_factory.mktemp("three"))
    return folder


def load_all(rank: int, folder: Path) -> list[tuple[int | None, str]]:
    """The newest, and each by its step."""
    return [load_with_words(rank, folder, step) for step in (None, 3, 1)]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_the_newest_whole_one_is_loaded_and_damage_is_told(
    pool: Pool, three: Path, tmp_path: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    """A bit may be flipped where one rank alone reads; all of them go back together."""
    folder = Path(shutil.copytree(three, tmp_path / "run"))
    damage(folder / "step-3" / name)
    zero, one = pool.run(2, load_all, folder)
    assert [step for step, _ in zero] == [step for step, _ in one] == [2, None, 1]
    (_, said), (_, refused), _ = zero
    assert one[0][1] == ""  # one rank alone tells
    assert said.count("\n") == 2
    assert said.endswith(f"rota: training resumes from {folder}/step-2\n")
    assert f"{folder}/step-3" in said
    assert name in said
    assert "left out" in said if name == "rota.json" else f"going back to {folder}/step-2" in said
    assert one[1][1] == refused
    assert f"{folder}/step-3" in refused
    assert "give another step" in refused


def test_where_all_are_damaged_nothing_starts_from_the_beginning(pool: Pool, three: Path, tmp_path: Path) -> None:
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    for step in (1, 2, 3):
        flip_last(tmp_path / f"step-{step}" / "rank-1.safetensors")
    for step, words in pool.run(2, load_with_words, tmp_path):
        assert step is None
        assert "step-1/rank-1.safetensors: it has changed since it was saved" in words
        assert "no other checkpoint is whole" in words
    for step in (1, 2, 3):
        truncate(tmp_path / f"step-{step}" / "rota.json")
    for step, words in pool.run(2, load_with_words, tmp_path):
        assert step is None
        assert "no other checkpoint is whole" in words


def refused_by_a_lock(rank: int, folder: Path) -> str:
    with Training(TWO) as training:
        return refusal(lambda: training.checkpoints(folder))


def use_twice(rank: int, folder: Path) -> None:
    """Two objects of one process share the folder, and leave it when the pipeline is closed."""
    for _ in range(2):
        training = Training(TWO)
        with training.pipeline as pipeline:
            training.checkpoints(folder).save(1)
            Checkpoints(folder, pipeline, None).load()


def test_a_second_job_is_refused_in_a_line_that_names_the_first(pool: Pool, tmp_path: Path) -> None:
    with locked(tmp_path), locked(tmp_path):
        told = pool.run(2, refused_by_a_lock, tmp_path)
        assert told[0] == told[1]
        assert f"{tmp_path} is in use by another job (process {os.getpid()} on " in told[0]
        assert "\n" not in told[0]
    pool.run(2, use_twice, tmp_path)
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path / LOCK)
    with pytest.raises(PipelineError, match=r"cannot lock .*; move "), locked(tmp_path):
        pass


HOLD = "import sys; from pathlib import Path; from rota.runtime.checkpoints.checkpoint_folder import locked\n"


@pytest.mark.faults
def test_the_lock_of_a_killed_job_is_gone_though_its_workers_live_on(tmp_path: Path) -> None:
    code = HOLD + dedent("""
        import os, time
        with locked(Path(sys.argv[1])):
            child = os.fork()
            os.write(1, b"%d\\n" % child)
            time.sleep(100)
    """)
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as job:
        workers = {int(job.stdout.readline()) for _ in range(2)} - {0}
        with pytest.raises(PipelineError, match=f"is in use by another job .process {job.pid} on "), locked(tmp_path):
            pass
        job.kill()
        job.wait()
        try:
            with locked(tmp_path):
                pass
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGKILL)


@pytest.mark.faults
def test_a_lock_that_is_left_for_a_while_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a rank that is started again: the one before it may be on a node that is lost."""
    code = HOLD + "with locked(Path(sys.argv[1])):\n    print(flush=True)\n    sys.stdin.read()"
    line = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], text=True, **line) as job:
        job.stdout.readline()
        with pytest.raises(PipelineError, match="is in use by another job"), locked(tmp_path, 0.2):
            pass
        holder, said = job.stdin, list[str]()

        def say(text: str) -> None:
            said.append(text)
            holder.close()  # the job ends once it is waited for

        monkeypatch.setattr(checkpoint_folder, "say", say)
        with locked(tmp_path, 60):
            assert holder.closed
        assert len(said) == 1
        assert f"{tmp_path} is in use by another job (process {job.pid} on " in said[0]
        assert said[0].endswith("; waiting up to 60 s for it")


SCRIPT = """
    import atexit, sys
    import torch, torch.distributed as dist
    from torch import nn
    import rota
    from rota import Cluster, Costs, Stages, place
    from rota.schedules import gpipe

    atexit.register(print, "registered before")
    folder, how = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    plan = gpipe(place(Costs.uniform(1), Cluster.uniform(1)), 2)
    pipeline = rota.Pipeline(Stages([nn.Linear(2, 2)]), plan, nn.functional.mse_loss)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    checkpoints = rota.Checkpoints(f"{folder}/run", pipeline, optimizer, asynchronous=True)
    atexit.register(print, "registered after")
    pipeline.step(torch.ones(2, 2), torch.ones(2, 2))
    if how != "well":
        from rota.runtime.checkpoints import checkpoint_folder
        def full(*args):
            raise OSError(28, "No space left on device")
        checkpoint_folder.publish = full
    checkpoints.save(1)
    if how == "raising":
        raise KeyError("of the user")
    print("the last line", end="")
"""


@pytest.mark.parametrize(("how", "code"), [swept("well", 0), ("failing", 1), ("raising", 1)])
def test_a_write_that_fails_after_the_last_line_fails_the_run(tmp_path: Path, how: str, code: int) -> None:
    (script := tmp_path / "script.py").write_text(dedent(SCRIPT))
    ended = subprocess.run(
        [sys.executable, script, tmp_path, how], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert "Exception ignored" not in ended.stderr
    assert "registered after" in ended.stdout
    if how == "failing":
        assert "the last line" in ended.stdout
        (line,) = [line for line in ended.stderr.splitlines() if "checkpoint" in line]
        assert line.startswith("rota: the last checkpoint was not saved: checkpoint: finishing, process 0: OSError: ")
        assert not (tmp_path / "run" / "step-1").exists()
    elif how == "well":
        assert ended.stderr == ""
        assert (tmp_path / "run" / "step-1").exists()
    else:
        assert "KeyError: 'of the user'" in ended.stderr
