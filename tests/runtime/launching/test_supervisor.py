"""The supervisor of `rota run`, with processes that need no torch: who is named, who is ended, and what is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rota import Cluster, Costs, PipelineError, place
from rota.runtime import control
from rota.runtime.launching import rank_processes, stand_by
from rota.runtime.launching.launch import launch
from rota.runtime.launching.rank_processes import RankFailed, Ranks
from rota.runtime.launching.requests import EndedBySignal, Requests
from rota.runtime.launching.run_folder import run_folder
from rota.schedules import gpipe
from support import ROOT
from support.faulty_training import processes_in

pytestmark = pytest.mark.dist

PLAN = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 2)
SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
TESTS = ROOT / "tests"


def supervised(folder: Path, monkeypatch: pytest.MonkeyPatch, *scripts: str) -> None:
    """One rank per script, to their end."""
    monkeypatch.chdir(folder)
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    (folder / "script").write_text("exec(open(f'script{rank}').read())")
    for rank, script in enumerate(scripts):
        (folder / f"script{rank}").write_text(script)
    with run_folder("rota-test-") as made, Requests() as requests, Ranks(made, requests) as ranks:
        environment = {**os.environ, "PYTHONPATH": paths}
        environments = [{**environment, "RANK": str(rank)} for rank in range(len(scripts))]
        ranks.start(("-m", "support.bare_rank", "script"), environments)
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
    garbage = [b"", b"\xff", b"[]", b"{}", b"[" * 60000, b'{"event": "hangs", "words": 3, "step": 0}']
    script = f"for data in {garbage}:\n    line.send(data)\nreport('opens'); report('closes')"
    supervised(tmp_path, monkeypatch, script, "report('opens')")


NO_MESSAGES = (
    b"null",
    b'{"event": "saves", "words": "", "step": 0}',
    b'{"event": "x", "words": "", "step": 0, "training": 0}',
    b'{"event": "saves", "words": "", "step": 0, "training": "0"}',
    b"1" * 5000,
)


@pytest.mark.parametrize("data", NO_MESSAGES)
def test_a_message_is_checked(data: bytes) -> None:
    assert control.Message.from_bytes(data) is None


def test_what_a_rank_forks_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"import os\nif not os.fork():\n    open('forked', 'w').close()\n    {SLEEP}"
    waits = "import os, time\nwhile not os.path.exists('forked'): time.sleep(0.01)"
    supervised(tmp_path, monkeypatch, script, waits)
    deadline = time.monotonic() + 200  # the kernel takes a moment to end it
    while others_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert others_in(tmp_path) == []


def test_a_process_that_has_left_its_ranks_session_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import subprocess\nprocess = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    supervised(tmp_path, monkeypatch, script + "open('daemon', 'w').write(str(process.pid))")
    assert others_in(tmp_path) == [(tmp_path / "daemon").read_text()]
    os.kill(int((tmp_path / "daemon").read_text()), signal.SIGKILL)


def test_a_rank_that_sigkill_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in a system call that does not return. The launcher does not wait for it without limit."""
    started, processes = rank_processes._started, []

    def noted(*arguments: Any) -> Any:
        line, process = started(*arguments)
        processes.append(process)
        return line, process

    monkeypatch.setattr(rank_processes, "_GONE_S", 0.2)
    monkeypatch.setattr(rank_processes, "_started", noted)
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    try:
        with pytest.raises(PipelineError) as error:
            supervised(tmp_path, monkeypatch, SLEEP, "exit(3)")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    who = f"rank 1 ended with exit code 3; rank 0 (process {processes[0].pid}) cannot be ended"
    assert str(error.value).startswith(f"{who}: a system call has not returned within 0.2 s of SIGKILL")


# --- restarts ---------------------------------------------------------------------------------------------------------


def launched(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    max_restarts: int,
    modules: tuple[str, ...] = (),
    report: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> list[str]:
    """What is told of restarts. The stand-by imports `modules`: these ranks need no torch."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    (folder / "script.py").write_text(script)
    monkeypatch.setattr(stand_by, "_MODULES", modules)
    monkeypatch.setattr(stand_by, "_OF_RESTARTS", ())
    told: list[str] = []

    def note(line: str) -> None:
        told.append(line)
        report(line)

    launch(PLAN, "script.py", worker="support.bare_rank", max_restarts=max_restarts, report=note, **options)
    return told


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


def test_a_newer_checkpoint_allows_more_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = launched(tmp_path, monkeypatch, dying(), max_restarts=1)
    assert told == ["rank 0 ended with exit code 9: restart 1 of 1"] * 5


@pytest.mark.parametrize("step", ["7", "10 - step"])
def test_the_same_steps_again_and_again_come_to_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with pytest.raises(PipelineError, match=r"^rank 0 ended with exit code 9 after 2 restarts, and the others were"):
        launched(tmp_path, monkeypatch, dying(step), max_restarts=2)
    assert (tmp_path / "count").read_text() == "..."


def test_restarts_are_counted_from_the_last_newer_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after = "after 1 restart without a newer checkpoint, 3 in all, and the others were ended"
    with pytest.raises(PipelineError, match=after):
        launched(tmp_path, monkeypatch, dying("min(step, 2)"), max_restarts=1)


def test_a_second_training_begins_with_low_steps_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 1 and 2 of the first one are followed by 0, 1, and 2 of the second one."""
    script = dying("(step + 1) % 3", "(step + 1) // 3")
    told = launched(tmp_path, monkeypatch, script, max_restarts=1)
    assert told == ["rank 0 ended with exit code 9: restart 1 of 1"] * 5


def test_a_script_without_a_pipeline_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match=r"script.py ended without making a rota.Pipeline on any rank"):
        launched(tmp_path, monkeypatch, "pass", max_restarts=3)


def test_a_script_that_makes_no_pipeline_for_long_is_reported_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import os, time\nwhile not os.path.exists('told'): time.sleep(0.01)\nreport('opens'); report('closes')"
    told = launched(
        tmp_path, monkeypatch, script, 0, report=lambda _: (tmp_path / "told").touch(), pipeline_within_s=0.1
    )
    (line,) = told
    assert line.startswith(
        "no rank has made a rota.Pipeline after 0.1 s: if script.py makes none, each of the 2 processes runs the whole "
    )


def test_ranks_that_end_before_a_pipeline_would_be_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = launched(tmp_path, monkeypatch, "report('opens'); report('closes')", 0, pipeline_within_s=1000.0)
    assert told == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_without_a_pipeline_that_is_stopped_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    script = f"import os, time\nif rank == 0:\n    os.kill(os.getppid(), {int(number)})\ntime.sleep(1000)"
    with pytest.raises((KeyboardInterrupt, EndedBySignal), match=r"no rank had made a rota\.Pipeline"):
        launched(tmp_path, monkeypatch, script, 0)


STAND_BYS = """
import os, signal, time
def stand_bys():  # the oldest child is first; ranks have the same command line
    children = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()
    return [int(one) for one in children if b"stand_by_process" in open(f"/proc/{one}/cmdline", "rb").read()]
"""

ENDS_THE_STAND_BY = (
    STAND_BYS
    + """
report("opens")
print(hash("rota"), file=open("hashes", "a"))
if rank == 0 and count() == 0:
    before = set(stand_bys())
    os.kill(stand_bys()[0], signal.SIGKILL)
    while not set(stand_bys()) - before:
        time.sleep(0.01)
    os._exit(9)
report("closes")
"""
)


def test_another_stand_by_replaces_one_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the ranks run: the rank fails once there is another. A script's sets keep their order."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    told = launched(tmp_path, monkeypatch, ENDS_THE_STAND_BY, max_restarts=1)
    assert told == ["rank 0 ended with exit code 9: restart 1 of 1"]
    hashes = (tmp_path / "hashes").read_text().split()
    assert len(hashes) == 4
    assert len({*hashes}) == 1


def test_numpys_number_of_threads_does_not_hurt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "4")
    script = "import numpy; report('opens'); report('closes')"
    assert launched(tmp_path, monkeypatch, script, max_restarts=0, modules=("numpy",)) == []


CHANGES = """
report("opens")
if rank == 0 and count() == 0:
    open("script.py", "a").write("# a change")
    exit(9)
report("closes")
"""


def test_a_script_that_has_changed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(tmp_path, monkeypatch, CHANGES, max_restarts=1) == [
        "rank 0 ended with exit code 9: restart 1 of 1",
        "script.py has changed since the run began: the ranks run it as it was then, but the modules that it "
        "imports are read again",
    ]


FAILS_WHILE_THE_STAND_BY_IS_STOPPED = (
    STAND_BYS
    + """
report("opens")
if rank == 0 and count() == 0:
    os.kill(stand_bys()[0], signal.SIGSTOP)
    os._exit(9)
report("closes")
"""
)


def test_a_stand_by_that_is_stopped_is_replaced_and_costs_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for as short as this only while it is stopped."""
    answer_s = stand_by._ANSWER_S

    def note(line: str) -> None:
        is_stopped = line.endswith("restart 1 of 1")
        monkeypatch.setattr(stand_by, "_ANSWER_S", 0.1 if is_stopped else answer_s)

    told = launched(tmp_path, monkeypatch, FAILS_WHILE_THE_STAND_BY_IS_STOPPED, max_restarts=1, report=note)
    assert told == [
        "rank 0 ended with exit code 9: restart 1 of 1",
        "the process that ranks are forked from has not answered within 0.1 s; ranks are started as soon as another "
        "one is ready",
    ]


def test_a_signal_ends_the_wait_for_a_stand_by_that_is_stopped() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, Requests() as requests:
        stopped = stand_by.StandBy({}, True, requests, print)
        stopped.line = ours
        requests._note(signal.SIGINT, None)
        with pytest.raises(KeyboardInterrupt):
            stopped.fork(["module"], [{}], [[theirs.fileno()]], lambda: requests.end_if_asked("before"))


HOLDS = """
import os
report("opens")
def held():
    files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd") if int(number) > 2]
    links = [os.readlink(file) for file in files if os.path.exists(file) or os.path.islink(file)]
    return sorted(link for link in links if link.startswith(("socket:", "/memfd:")))
memory, own = held()
assert memory.startswith(f"/memfd:rota-rank-{rank}"), memory
os.system("ls -l /proc/self/fd > child")
assert not any(word in open("child").read() for word in ("socket:[" + own[8:], "memfd")), open("child").read()
report("closes")
"""


def test_a_rank_holds_only_its_own_socket_and_memory_and_a_child_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launched(tmp_path, monkeypatch, HOLDS, max_restarts=1) == []


# --- the launcher itself ----------------------------------------------------------------------------------------------

LAUNCHER = """
import os, sys
from rota import Plan
from rota.runtime.launching import rank_processes
from rota.runtime.launching.launch import launch
launch(Plan.from_json(open("plan.json").read()), "script.py", worker="support.bare_rank")
"""


def left_in(temporary: Path) -> list[Path]:
    """All but the cache that PyTorch makes there when it is imported."""
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


@pytest.mark.faults
def test_nothing_is_left_of_a_killed_launcher(tmp_path: Path) -> None:
    """Neither ranks, nor what they have forked, nor the folder."""
    folder, temporary = tmp_path / "run", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    (folder / "plan.json").write_text(PLAN.to_json())
    (folder / "script.py").write_text(f"import os\nos.fork()\nopen(f'{{os.getpid()}}', 'w').close()\n{SLEEP}")
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(temporary)}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], cwd=folder, env=environment)
    try:
        while len([*folder.glob("[0-9]*")]) < 4:
            assert launcher.poll() is None
            time.sleep(0.01)
        assert [*temporary.glob("rota-run-*")]
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    deadline = time.monotonic() + 200
    while (processes_in(folder) or left_in(temporary)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes_in(folder) == []
    assert left_in(temporary) == []
