"""Replicas on two nodes, of which one rank or all are lost: the others go on, and a new rank or node joins them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from support.pool import Pool
from support.replicated_training import NUM_STAGES

from .test_crew import NUM_STEPS, PLAN, SCRIPT, backups_of, of_steps, told, undisturbed
from .test_nodes import SECRET, assert_nothing_left, free_port, tmp_path, words

__all__ = ["tmp_path"]

pytestmark = [pytest.mark.dist, pytest.mark.faults]


def prepare(folder: Path, *faults: Sequence[int | str]) -> None:
    (folder / "tmp").mkdir()
    (folder / "faults.json").write_text(json.dumps(faults))
    (folder / "plan.json").write_text(PLAN.to_json())
    (folder / "backups.json").write_text(backups_of(PLAN, 2).to_json())


def node(
    folder: Path, number: int, port: int, *options: str, join_at: int = -1, what: str = str(NUM_STEPS)
) -> subprocess.Popen[str]:
    """`rota run` as one of two nodes, of which each has one replica; its errors are in `stderr-NUMBER`."""
    of_nodes = ["--nodes", "2", "--node", str(number), "--head", f"127.0.0.1:{port}", "--backups", "backups.json"]
    command = [sys.executable, "-m", "rota", "run", *of_nodes, *options, "plan.json", SCRIPT, what, str(join_at)]
    more = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), "ROTA_SECRET": SECRET}
    with (folder / f"stderr-{number}").open("a") as stderr:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **more, "FIRST": str(number * NUM_STAGES)},
            stderr=stderr,
            text=True,
        )


def await_that(is_so: Callable[[], bool], folder: Path, process: subprocess.Popen[str]) -> None:
    while not is_so():
        assert process.poll() is None, words(folder)
        time.sleep(0.01)


def kill_node_1(folder: Path, processes: list[subprocess.Popen[str]]) -> None:
    """In the middle of step 3."""
    await_that(lambda: [*folder.glob("fault-*3,*")] != [], folder, processes[0])
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()
    await_that(lambda: max(step for step, *_ in told(folder)) == 6, folder, processes[0])


def of_losses(folder: Path) -> list[str]:
    """What node 0 says of losses and of those who come back."""
    lines = (line.removeprefix("rota run: ").partition(": makespan")[0] for line in words(folder)[0].splitlines())
    return [line for line in lines if line.startswith(("rank", "node 1")) and " was slower " not in line]


def assert_exact(folder: Path, pool: Pool) -> None:
    """All losses are the undisturbed run's, and no checkpoint was read."""
    expected = dict(pool.run(2 * NUM_STAGES, undisturbed, PLAN)[0])
    found = told(folder)
    assert [step for step, *_ in found] == [*range(NUM_STEPS)], words(folder)
    for step, loss, _ in found:
        assert loss == pytest.approx(expected[step], abs=1e-12, rel=0)
    assert not [*(folder / "run").glob("step-*")]


def test_a_rank_on_any_node_is_lost_and_joins_again(pool: Pool, tmp_path: Path) -> None:
    """One of node 1, which joins at step 7, is lost in that step, and joins again; then one of node 0.

    Its peer is on the other node.
    """
    prepare(tmp_path, (3, 1, 1), (7, 1, 1), (10, 0, 0))
    port = free_port()
    processes = [node(tmp_path, number, port, "--rejoin-after", "6", join_at=7) for number in range(2)]
    assert [process.wait(200) for process in processes] == [0, 0], words(tmp_path)
    assert_exact(tmp_path, pool)
    assert [ranks for *_, ranks in told(tmp_path)] == [3 if 3 <= step < 7 or step >= 10 else 2 for step in range(14)]
    lost_and_back = [
        "rank 3 on node 1 (127.0.0.1) ended with SIGKILL: the others go on without rank 1 of replica 1",
        "rank 1 of replica 1 joins again",
    ]
    last = "rank 0 ended with SIGKILL: the others go on without rank 0 of replica 0"
    assert of_losses(tmp_path) == [*lost_and_back, *lost_and_back, last]
    resumed = re.findall(r"training resumes from step (\d+) in memory", "".join(words(tmp_path)))
    assert sorted(map(int, resumed)) == [3, 7, 7, 7, 10]
    assert_nothing_left(tmp_path)


IN_STEP_3 = (3, 1, 1, "wait")


def test_no_sample_is_lost_or_seen_twice_when_a_node_is_lost(tmp_path: Path) -> None:
    """In the middle of an epoch; the node comes back in the middle of the next one, which was begun without it."""
    folders = expected, found = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
        is_disturbed, port = folder is found, free_port()
        prepare(folder, *([IN_STEP_3] if is_disturbed else []))
        join_at = 7 if is_disturbed else -1
        processes = [node(folder, i, port, "--rejoin-after", "1", join_at=join_at, what="epochs") for i in range(2)]
        if is_disturbed:
            kill_node_1(folder, processes)
            processes[1] = node(folder, 1, port, "--rejoin-after", "1", join_at=join_at, what="epochs")
        assert [process.wait(200) for process in processes] == [0, 0], words(folder)
    for (step, loss, numbers), (same, other, others) in zip(of_steps(found), of_steps(expected), strict=True):
        assert (step, numbers) == (same, others)
        assert loss == pytest.approx(other, abs=1e-12, rel=0)
    assert_nothing_left(found)


def test_a_node_is_killed_and_joins_again(pool: Pool, tmp_path: Path) -> None:
    """Its peers do its work until the same command is started again, whenever that is."""
    prepare(tmp_path, IN_STEP_3)
    port = free_port()
    processes = [node(tmp_path, number, port, "--rejoin-after", "1", join_at=7) for number in range(2)]
    kill_node_1(tmp_path, processes)
    processes[1] = node(tmp_path, 1, port, "--rejoin-after", "1", join_at=7)
    assert [process.wait(200) for process in processes] == [0, 0], words(tmp_path)
    assert_exact(tmp_path, pool)
    assert of_losses(tmp_path) == [
        "node 1 (127.0.0.1) is lost: its connection was closed; its ranks 2 to 3 are done by their peers",
        "node 1 (127.0.0.1) has joined again",
        "rank 0 of replica 1 and rank 1 of replica 1 join again",
    ]
    assert_nothing_left(tmp_path)


def test_a_node_that_has_lost_a_rank_is_cut_off_and_joins_again(pool: Pool, tmp_path: Path) -> None:
    """Its supervisor is stopped, but not its ranks, of which one is the first of all and has the folder's lock."""
    prepare(tmp_path, (2, 1, 1), (3, 1, 0, "wait"))
    port = free_port()
    processes = [node(tmp_path, number, port, "--rejoin-after", "20", join_at=7) for number in range(2)]
    await_that(lambda: [*tmp_path.glob("fault-*3,*")] != [], tmp_path, processes[0])
    processes[1].send_signal(signal.SIGSTOP)
    await_that(lambda: "its rank 2 is done" in words(tmp_path)[0], tmp_path, processes[0])
    processes[1].send_signal(signal.SIGCONT)
    assert processes[1].wait(200) == 1
    assert "if the run goes on there, start the same command here, and it joins again" in words(tmp_path)[1]
    processes[1] = node(tmp_path, 1, port, "--rejoin-after", "20", join_at=7)
    assert [process.wait(200) for process in processes] == [0, 0], words(tmp_path)
    assert_exact(tmp_path, pool)
    assert of_losses(tmp_path) == [
        "rank 3 on node 1 (127.0.0.1) ended with SIGKILL: the others go on without rank 1 of replica 1",
        "node 1 (127.0.0.1) is lost: it sent nothing for 15 s; its rank 2 is done by its peers",
        "node 1 (127.0.0.1) has joined again",
        "rank 1 of replica 1 and rank 0 of replica 1 join again",
    ]
    assert_nothing_left(tmp_path)


def test_a_lost_node_ends_the_run_if_a_stage_is_left_nowhere(tmp_path: Path) -> None:
    """The peer of one of its ranks has been lost before, so nobody has the weights of stage 1."""
    prepare(tmp_path, (2, 0, 1), IN_STEP_3)
    port = free_port()
    processes = [node(tmp_path, number, port) for number in range(2)]
    await_that(lambda: [*tmp_path.glob("fault-*3,*")] != [], tmp_path, processes[0])
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()
    assert processes[0].wait(200) == 1
    last = words(tmp_path)[0].splitlines()[-1]
    assert last.startswith("rota run: error: node 1 (127.0.0.1) is lost: its connection was closed; the others cannot ")
    assert "rank 1 is lost in every replica, so nobody has the weights of stage 1" in last
    assert "Start the command again on all nodes: it goes on from the last checkpoint" in last
    assert_nothing_left(tmp_path)


def test_a_request_to_end_reaches_ranks_that_are_all_on_other_nodes(tmp_path: Path) -> None:
    """Node 0 has lost all its ranks, and coordinates the run all the same."""
    prepare(tmp_path, (1, 0, 1), (3, 0, 0), (5, 1, 1, "wait"))
    port = free_port()
    processes = [node(tmp_path, number, port, what="epochs") for number in range(2)]
    await_that(lambda: [*tmp_path.glob("fault-*5,*")] != [], tmp_path, processes[0])
    processes[0].send_signal(signal.SIGTERM)
    time.sleep(1)
    (tmp_path / "go").touch()
    assert [process.wait(200) for process in processes] == [143, 143], words(tmp_path)
    of_leader, _ = words(tmp_path)
    assert "the others go on without rank 0 of replica 0" in of_leader
    assert "SIGTERM: all ranks have ended after the step that was running" in of_leader
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-6"]
    assert_nothing_left(tmp_path)
