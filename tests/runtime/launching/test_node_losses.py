"""Replicas on two nodes, of which one rank or all are lost: the others go on, and a new rank or node joins them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.pool import Pool
from support.replicated_training import NUM_STAGES

from .test_crew import NUM_STEPS, PLAN, SCRIPT, backups_of, of_steps, told, undisturbed
from .test_nodes import SECRET, assert_nothing_left, free_port, tmp_path, words

__all__ = ["tmp_path"]

pytestmark = [pytest.mark.dist, pytest.mark.faults]


def prepare(folder: Path, faults: list[list[int]]) -> None:
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


def await_step(folder: Path, step: int, processes: list[subprocess.Popen[str]]) -> None:
    while not (folder / "losses").exists() or max((done for done, *_ in told(folder)), default=-1) < step:
        assert None in [process.poll() for process in processes], words(folder)
        time.sleep(0.01)


def assert_exact(folder: Path, pool: Pool, lost: list[range]) -> None:
    """All losses are the undisturbed run's, and the steps in `lost` were done with a backup plan."""
    expected = dict(pool.run(2 * NUM_STAGES, undisturbed, PLAN)[0])
    found = told(folder)
    assert [step for step, *_ in found] == [*range(NUM_STEPS)], words(folder)
    for step, loss, ranks in found:
        assert loss == pytest.approx(expected[step], abs=1e-12, rel=0)
        assert (ranks != NUM_STAGES) == any(step in steps for steps in lost), (step, ranks)
    assert not [*(folder / "run").glob("step-*")]  # nothing was read from a checkpoint, as there is none


def test_a_rank_on_any_node_is_lost_and_joins_again(pool: Pool, tmp_path: Path) -> None:
    """One of node 1, which joins at step 7; then one of node 0. Its peer is on the other node."""
    prepare(tmp_path, [[3, 1, 1], [10, 0, 0]])
    port = free_port()
    processes = [node(tmp_path, number, port, "--rejoin-after", "6", join_at=7) for number in range(2)]
    assert [process.wait(200) for process in processes] == [0, 0], words(tmp_path)
    assert_exact(tmp_path, pool, [range(3, 7), range(10, NUM_STEPS)])
    of_leader, of_follower = words(tmp_path)
    lines = [line.partition(": makespan")[0] for line in of_leader.splitlines() if line.startswith("rota run: rank")]
    assert lines == [
        "rota run: rank 3 on node 1 (127.0.0.1) ended with SIGKILL: the others go on without rank 1 of replica 1",
        "rota run: rank 1 of replica 1 joins again",
        "rota run: rank 0 ended with SIGKILL: the others go on without rank 0 of replica 0",
    ]
    assert "training resumes from step 7 in memory" in of_leader + of_follower
    assert_nothing_left(tmp_path)


def test_no_sample_is_lost_or_seen_twice_when_a_node_is_lost(tmp_path: Path) -> None:
    """In the middle of an epoch; the node comes back in the middle of the next one, which was begun without it."""
    folders = expected, found = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
        prepare(folder, [])
        port, is_disturbed = free_port(), folder is found
        options, join_at = ("--rejoin-after", "1"), 7 if is_disturbed else -1
        processes = [node(folder, i, port, *options, join_at=join_at, what="epochs") for i in range(2)]
        if is_disturbed:
            await_step(folder, 2, processes)
            processes[1].send_signal(signal.SIGKILL)
            processes[1].wait()
            await_step(folder, 6, processes[:1])
            processes[1] = node(folder, 1, port, *options, join_at=join_at, what="epochs")
        assert [process.wait(200) for process in processes] == [0, 0], words(folder)
    assert [[step, numbers] for step, _, numbers in of_steps(found)] == [
        [step, numbers] for step, _, numbers in of_steps(expected)
    ]
    for (_, loss, _), (_, other, _) in zip(of_steps(found), of_steps(expected), strict=True):
        assert loss == pytest.approx(other, abs=1e-12, rel=0)
    assert_nothing_left(found)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_is_lost_and_joins_again(pool: Pool, tmp_path: Path, how: signal.Signals) -> None:
    """Killed, or silent for 15 s; its peers do its work until the same command is started again, whenever that is."""
    prepare(tmp_path, [])
    port = free_port()
    processes = [node(tmp_path, number, port, "--rejoin-after", "1", join_at=8) for number in range(2)]
    await_step(tmp_path, 2, processes)
    processes[1].send_signal(how)
    await_step(tmp_path, 7, processes[:1])
    if how == signal.SIGSTOP:
        processes[1].send_signal(signal.SIGCONT)
        assert processes[1].wait(200) == 1
        assert "If the run goes on there, start the same command here again, and it joins" in words(tmp_path)[1]
    processes[1].wait()
    processes[1] = node(tmp_path, 1, port, "--rejoin-after", "1", join_at=8)
    assert [process.wait(200) for process in processes] == [0, 0], words(tmp_path)
    lost_at = min(step for step, _, ranks in told(tmp_path) if ranks != NUM_STAGES)
    assert_exact(tmp_path, pool, [range(lost_at, 8)])
    of_leader, _ = words(tmp_path)
    lines = [line.partition(": makespan")[0] for line in of_leader.splitlines() if "node 1" in line or "join" in line]
    why = "its connection was closed" if how == signal.SIGKILL else "it sent nothing for 15 s"
    assert lines[1:] == [
        f"rota run: node 1 (127.0.0.1) is lost: {why}; its ranks 2 to 3 are done by their peers",
        "rota run: node 1 (127.0.0.1) has joined again",
        "rota run: rank 0 of replica 1 and rank 1 of replica 1 join again",
    ]
    assert_nothing_left(tmp_path)
