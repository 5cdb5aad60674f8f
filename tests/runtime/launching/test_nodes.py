"""One training on two nodes: two `rota run` on this machine, each with its own ranks, that share loopback alone."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faulty_training import processes_in

from .test_elastic import NUM_STEPS, PLAN, SCRIPT, environment, rota_run, told

pytestmark = [pytest.mark.dist, pytest.mark.faults]

SECRET = "0123456789abcdef" * 2


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """With a short name: the ranks' sockets are in it, and a socket's path has 108 characters at most."""
    with tempfile.TemporaryDirectory(prefix="rota-test-") as name:
        yield Path(name)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def node(folder: Path, number: int, port: int, *options: str, secret: str = SECRET) -> subprocess.Popen[str]:
    """`rota run` as one of two nodes. It is known by the variable NODE; its errors are in `stderr-NUMBER`."""
    of_nodes = ["--nodes", "2", "--node", str(number), "--head", f"127.0.0.1:{port}"]
    command = [sys.executable, "-m", "rota", "run", *of_nodes, *options, "plan.json", SCRIPT, str(NUM_STEPS), "epochs"]
    with (folder / f"stderr-{number}").open("a") as stderr:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder, ROTA_SECRET=secret, NODE=str(number)),
            stderr=stderr,
            text=True,
        )


def prepare(folder: Path, *faults: tuple[int, int | str, str]) -> None:
    (folder / "plan.json").write_text(PLAN.to_json())
    (folder / "faults.json").write_text(json.dumps(faults))


def both(folder: Path, *options: str) -> list[int]:
    """The exit codes of both nodes."""
    port = free_port()
    processes = [node(folder, number, port, *options) for number in range(2)]
    return [process.wait(400) for process in processes]


def words(folder: Path) -> list[str]:
    return [(folder / f"stderr-{number}").read_text() for number in range(2)]


def await_step(folder: Path, processes: list[subprocess.Popen[str]]) -> None:
    while not (folder / "losses").exists():
        assert [process.poll() for process in processes] == [None, None], words(folder)
        time.sleep(0.05)


def assert_nothing_left(folder: Path) -> None:
    deadline = time.monotonic() + 120
    while processes_in(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_in(folder) == []
    assert [*(folder / "tmp").glob("rota-*")] == []


def test_losses_are_those_of_one_node_and_ranks_that_die_lose_no_step(tmp_path: Path) -> None:
    """A rank of each node is killed, and one raises an error. Nothing is done twice but the step that failed."""
    on_one, tmp_path = tmp_path / "one", tmp_path / "two"
    for folder in (on_one, tmp_path):
        folder.mkdir()
    prepare(tmp_path, (3, 3, "SIGKILL"), (6, 0, "SIGKILL"), (9, 2, "raise"))
    assert both(tmp_path, "--max-restarts", "3", "--timeline", "measured.json") == [0, 0], words(tmp_path)
    prepare(on_one)
    assert rota_run(on_one, arguments=["epochs"]).returncode == 0
    assert {step: rest for step, *rest in told(tmp_path)} == {step: rest for step, *rest in told(on_one)}
    assert len(told(tmp_path)) <= len(told(on_one)) + 3
    of_leader, of_follower = words(tmp_path)
    assert "rota run: rank 3 on node 1 (127.0.0.1) ended with SIGKILL: restart 1 of 3" in of_leader
    assert "rota run: rank 0 ended with SIGKILL: restart" in of_leader
    assert len(re.findall(r"training resumes from step \d+ in memory", of_leader)) == 3
    assert "broken on purpose" in of_follower  # what its ranks write; node 0 alone tells of restarts
    assert (tmp_path / "measured.json").exists()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_that_dies_ends_the_run_on_the_other(tmp_path: Path, killed: int) -> None:
    prepare(tmp_path, (5, 1, "wait"))
    port = free_port()
    processes = [node(tmp_path, number, port, "--max-restarts", "3") for number in range(2)]
    await_step(tmp_path, processes)
    processes[killed].send_signal(signal.SIGKILL)
    assert processes[1 - killed].wait(200) == 1
    processes[killed].wait()
    lost = f"node {killed} (127.0.0.1) is lost: its connection"
    assert lost in words(tmp_path)[1 - killed]
    assert_nothing_left(tmp_path)


def test_a_node_that_is_cut_off_ends_the_run(tmp_path: Path) -> None:
    prepare(tmp_path, (5, 1, "wait"))
    port = free_port()
    processes = [node(tmp_path, number, port, "--max-restarts", "3") for number in range(2)]
    await_step(tmp_path, processes)
    processes[1].send_signal(signal.SIGSTOP)
    assert processes[0].wait(300) == 1
    assert "node 1 (127.0.0.1) is lost: it sent nothing for 15 s" in words(tmp_path)[0]
    processes[1].send_signal(signal.SIGCONT)
    assert processes[1].wait(200) == 1
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("asked", [0, 1])
def test_ctrl_c_on_any_node_ends_all(tmp_path: Path, asked: int) -> None:
    prepare(tmp_path, (5, 1, "wait"))
    port = free_port()
    processes = [node(tmp_path, number, port, "--max-restarts", "3") for number in range(2)]
    await_step(tmp_path, processes)
    processes[asked].send_signal(signal.SIGINT)
    assert [process.wait(200) for process in processes] == [130, 130], words(tmp_path)
    assert_nothing_left(tmp_path)


def test_a_wrong_secret_is_refused_on_both_sides(tmp_path: Path) -> None:
    """It does not end the run of the others: node 0 goes on waiting, until a node with other options comes."""
    prepare(tmp_path)

    port = free_port()
    leader = node(tmp_path, 0, port)
    assert node(tmp_path, 1, port, secret="another" * 6).wait(200) == 1
    of_leader, of_follower = words(tmp_path)
    told = "the secrets differ; give all nodes the same"
    assert f"rota run: a connection from 127.0.0.1 was refused: {told}" in of_leader
    assert f"node 0 at 127.0.0.1:{port}: it refuses this node: {told}" in of_follower
    assert leader.poll() is None
    assert node(tmp_path, 1, port, "--timeout", "77").wait(200) == 1
    assert leader.wait(200) == 1
    for each in words(tmp_path):
        assert "node 1 (127.0.0.1) is refused: its options of rota run differ from node 0's" in each
    assert not (tmp_path / "losses").exists()
    assert_nothing_left(tmp_path)
