"""The supervisor of `rota run`, with processes that need no torch: who is named, who is ended, and what is left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rota import Cluster, Costs, PipelineError, place
from rota.runtime.launching import rank_processes
from rota.runtime.launching.rank_processes import RankFailed, Ranks, in_new_interpreter
from rota.runtime.launching.requests import Requests
from rota.runtime.launching.run_folder import run_folder
from rota.schedules import gpipe
from support import ROOT
from support.faulty_training import processes_in, until

pytestmark = pytest.mark.dist

PLAN = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 2)
SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
TESTS = ROOT / "tests"


def supervised(folder: Path, monkeypatch: pytest.MonkeyPatch, *scripts: str) -> None:
    """One rank per script, to their end."""
    monkeypatch.chdir(folder)
    (folder / "script").write_text("exec(open(f'script{rank}').read())")
    for rank, script in enumerate(scripts):
        (folder / f"script{rank}").write_text(script)
    with run_folder("rota-supervised-") as made, Requests() as requests, Ranks(made, requests) as ranks:
        environments = [{**environment(), "RANK": str(rank)} for rank in range(len(scripts))]
        ranks.start(partial(in_new_interpreter, ("-m", "support.bare_rank", "script")), environments)
        ranks.wait()


def others_in(folder: Path) -> list[str]:
    """Processes that work in the folder, this one aside."""
    return [process for process in processes_in(folder) if process != str(os.getpid())]


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (SLEEP, "import os; os._exit(3)", "rank 1 ended with exit code 3"),
        (SLEEP, "import os; os.kill(os.getpid(), 9)", "rank 1 ended with SIGKILL"),
        # Rank 0 has lost rank 1, and is gone before it.
        ("report('lost'); exit(1)", "import time; time.sleep(0.5); exit(7)", "rank 1 ended with exit code 7"),
        (
            "import os\nwhile not os.path.exists('failed'): pass\nreport('lost'); exit(1)",
            "report('fails', 'ValueError: no'); open('failed', 'w').close(); " + SLEEP,
            "rank 1 failed (ValueError: no)",
        ),
        ("report('lost'); exit(1)", SLEEP, "rank 0 ended with exit code 1"),
        # An exit code of 0 is no good end for all of them.
        (
            "report('opens'); report('lost'); exit(1)",
            "import os; report('opens'); os._exit(0)",
            "rank 1 ended with exit code 0 in the middle of its pipeline",
        ),
        ("report('joins'); " + SLEEP, "exit(0)", "rank 1 ended with exit code 0 before it joined the others"),
        (
            "report('joins'); report('opens'); " + SLEEP,
            "report('joins'); exit(0)",
            "rank 1 ended with exit code 0 before it made the pipeline that the others make",
        ),
        # The script has gone on after its first error.
        (
            "report('fails', 'no'); report('closes'); report('opens'); " + SLEEP,
            "import time; report('opens'); time.sleep(0.3); exit(5)",
            "rank 1 ended with exit code 5",
        ),
        (SLEEP, "report('hangs', 'rank 0 makes no progress'); " + SLEEP, "the run hung (rank 0 makes no progress)"),
    ],
)
def test_who_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str, told: str) -> None:
    # How long the rank with the first error has to end, where it ends; a little where it does not.
    monkeypatch.setattr(rank_processes, "_FIRST_FAILURE_S", 0.3 if second.endswith(SLEEP) else 100.0)
    with pytest.raises(RankFailed) as error:
        supervised(tmp_path, monkeypatch, first, second)
    assert str(error.value) == told
    assert others_in(tmp_path) == []


def test_what_is_no_message_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    garbage = [b"", b"\xff", b"[]", b"{}", b"null", b"[" * 60000, b'{"event": "hangs", "words": 3}', b'{"event": "x"}']
    script = f"for data in {garbage}:\n    line.send(data)\nreport('opens'); report('closes')"
    supervised(tmp_path, monkeypatch, script, "report('opens')")


def test_what_a_rank_forks_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"import os\nif not os.fork():\n    open('forked', 'w').close()\n    {SLEEP}"
    waits = "import os, time\nwhile not os.path.exists('forked'): time.sleep(0.01)"
    supervised(tmp_path, monkeypatch, script, waits)
    assert until(lambda: others_in(tmp_path) == [])  # the kernel takes a moment to end it


def test_a_process_that_left_its_ranks_session_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import subprocess\nprocess = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    supervised(tmp_path, monkeypatch, script + "open('daemon', 'w').write(str(process.pid))")
    assert others_in(tmp_path) == [(tmp_path / "daemon").read_text()]
    os.kill(int((tmp_path / "daemon").read_text()), signal.SIGKILL)


def test_a_rank_that_sigkill_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in a system call that does not return. The launcher does not wait for it without limit."""
    started, processes = rank_processes._started, []

    def noted(*arguments: Any) -> Any:
        processes.append(rank := started(*arguments))
        rank.kill = lambda: None
        return rank

    monkeypatch.setattr(rank_processes, "_GONE_S", 0.2)
    monkeypatch.setattr(rank_processes, "_started", noted)
    try:
        with pytest.raises(PipelineError) as error:
            supervised(tmp_path, monkeypatch, SLEEP, "exit(3)")
    finally:
        os.kill(processes[0].pid, signal.SIGKILL)
        os.waitpid(processes[0].pid, 0)
    who = f"rank 1 ended with exit code 3; rank 0 (process {processes[0].pid}) cannot be ended"
    assert str(error.value).startswith(f"{who}: a system call has not returned within 0.2 s of SIGKILL")


LAUNCHER = """
import json, sys
from rota import Plan
from rota.runtime.launching import forking
from rota.runtime.launching.launch import Launch, launch
forking.MODULES = tuple(sys.argv[2:])
def report(line):
    print(line, flush=True)
    open("told", "w").close()
plan, options = Plan.from_json(open("plan.json").read()), json.loads(sys.argv[1])
launch(plan, "script.py", (), Launch(worker="support.bare_rank", forks=True, **options), report)
"""


def command_of(folder: Path, script: str, modules: Sequence[str] = (), **options: Any) -> list[str]:
    """A launcher that has imported `modules`: these ranks need no torch."""
    (folder / "plan.json").write_text(PLAN.to_json())
    (folder / "script.py").write_text(script)
    return [sys.executable, "-c", LAUNCHER, json.dumps(options), *modules]


def environment(**more: str) -> dict[str, str]:
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, **more}


def launched(folder: Path, script: str, modules: Sequence[str] = (), **options: Any) -> tuple[list[str], str]:
    """What is told of restarts, and the error; "" if there is none."""
    command = command_of(folder, script, modules, **options)
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200)
    assert others_in(folder) == []
    return done.stdout.splitlines(), done.stderr.splitlines()[-1] if done.returncode else ""


DIES_AFTER_EACH_CHECKPOINT = """
import os
report("opens")
if rank == 0:
    step = count()
    report("saves", step={step}, training={training})
    if step < 5:
        os._exit(9)
report("closes")
"""


def dying(step: str = "step", training: str = "0") -> str:
    return DIES_AFTER_EACH_CHECKPOINT.format(step=step, training=training)


RESTART = "rank 0 ended with exit code 9: restart 1 of 1"


def test_a_newer_checkpoint_allows_more_restarts(tmp_path: Path) -> None:
    assert launched(tmp_path, dying(), max_restarts=1) == ([RESTART] * 5, "")


@pytest.mark.parametrize("step", ["7", "10 - step"])
def test_the_same_steps_again_and_again_come_to_an_end(tmp_path: Path, step: str) -> None:
    _, error = launched(tmp_path, dying(step), max_restarts=2)
    assert "PipelineError: rank 0 ended with exit code 9 after 2 restarts, and the others were" in error
    assert (tmp_path / "count").read_text() == "..."


def test_restarts_are_counted_from_the_last_newer_checkpoint(tmp_path: Path) -> None:
    _, error = launched(tmp_path, dying("min(step, 2)"), max_restarts=1)
    assert "after 1 restart without a newer checkpoint, 3 in all, and the others were ended" in error


def test_a_second_training_begins_with_low_steps_again(tmp_path: Path) -> None:
    """Steps 1 and 2 of the first one are followed by 0, 1, and 2 of the second one."""
    script = dying("(step + 1) % 3", "(step + 1) // 3")
    assert launched(tmp_path, script, max_restarts=1) == ([RESTART] * 5, "")


def test_a_script_without_a_pipeline_is_an_error(tmp_path: Path) -> None:
    _, error = launched(tmp_path, "pass", max_restarts=3)
    assert "script.py ended without making a rota.Pipeline on any rank" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_without_a_pipeline_that_is_stopped_says_so(tmp_path: Path, number: signal.Signals) -> None:
    script = f"import os, time\nif rank == 0:\n    os.kill(os.getppid(), {int(number)})\ntime.sleep(1000)"
    _, error = launched(tmp_path, script)
    assert re.search(r"(KeyboardInterrupt|EndedBySignal): .*no rank had made a rota\.Pipeline", error)


def test_a_launcher_with_more_than_one_thread_forks_nothing(tmp_path: Path) -> None:
    (tmp_path / "two_threads.py").write_text("import threading\nthreading.Thread(target=input, daemon=True).start()")
    command = command_of(tmp_path, "pass", ["two_threads"])
    paths = os.pathsep.join([str(tmp_path), str(TESTS), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(PYTHONPATH=paths), stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as launcher:
        told = launcher.stderr.readline() + launcher.stderr.read()
    assert b"this process has 2 threads after its imports, so no rank can be forked from it" in told


def test_numpys_number_of_threads_does_not_hurt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each rank has random numbers of its own."""
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "4")
    script = "import numpy\nopen(f'{numpy.random.rand()}', 'w').close(); report('opens'); report('closes')"
    assert launched(tmp_path, script, ["numpy"]) == ([], "")
    assert len([*tmp_path.glob("0.*")]) == 2


ENDS = """
import atexit, threading, time
report("opens")
file = open(f"unclosed-{rank}", "w")
file.write("kept")
atexit.register(lambda: open(f"at-exit-{rank}", "w").close())
threading.Thread(target=lambda: (time.sleep(0.2), open(f"thread-{rank}", "w").close())).start()
report("closes")
exit("told")
"""


def test_a_forked_rank_ends_as_python_does(tmp_path: Path) -> None:
    """It waits for threads, calls functions that are registered, and flushes files; its exit code is the script's."""
    _, error = launched(tmp_path, ENDS)
    assert re.search(r"rank \d ended with exit code 1", error)
    for_ranks = [{path.name[:-2] for path in tmp_path.glob(f"*-{rank}")} for rank in range(2)]
    assert {"unclosed", "at-exit", "thread"} in for_ranks
    assert any((tmp_path / f"unclosed-{rank}").read_text() == "kept" for rank in range(2))


CHANGES = """
report("opens")
if rank == 0 and count() == 0:
    open("script.py", "a").write("# a change")
    exit(9)
report("closes")
"""


def test_a_script_that_has_changed_is_reported(tmp_path: Path) -> None:
    told, error = launched(tmp_path, CHANGES, max_restarts=1)
    assert error == ""
    assert told == [
        RESTART,
        "script.py has changed since the run began: the ranks run it as it was then, but the modules that it "
        "imports are read again",
    ]


HOLDS = """
import os
report("opens")
def held():
    files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd") if int(number) > 2]
    return [os.readlink(file) for file in files if os.path.lexists(file)]
(own,) = (link for link in held() if "script" not in link)
assert own.startswith("socket:"), own
os.system("ls -l /proc/self/fd > child")
assert own not in open("child").read(), open("child").read()
report("closes")
"""


def test_a_rank_holds_only_its_own_socket_and_a_child_not_even_that(tmp_path: Path) -> None:
    assert launched(tmp_path, HOLDS) == ([], "")


def left_in(temporary: Path) -> list[Path]:
    """All but the cache that PyTorch makes there when it is imported."""
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


@pytest.mark.faults
def test_nothing_is_left_of_a_killed_launcher(tmp_path: Path) -> None:
    """Neither ranks, nor what they have forked, nor the folder."""
    folder, temporary = tmp_path / "run", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    command = command_of(folder, f"import os\nos.fork()\nopen(f'{{os.getpid()}}', 'w').close()\n{SLEEP}")
    launcher = subprocess.Popen(command, cwd=folder, env=environment(TMPDIR=str(temporary)))
    try:
        while len([*folder.glob("[0-9]*")]) < 4:
            assert launcher.poll() is None
            time.sleep(0.01)
        assert [*temporary.glob("rota-run-*")]
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    assert until(lambda: processes_in(folder) == left_in(temporary) == [])
