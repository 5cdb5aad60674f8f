"""Node 0 and another node of a run, as two threads that talk over loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rota import PipelineError
from rota.runtime.kept_memory import KeptMemories, State
from rota.runtime.launching.follower import Follower
from rota.runtime.launching.leader import Leader
from rota.runtime.launching.nodes import Nodes
from rota.runtime.launching.requests import Requests

JOB = {"plan": "the same"}
SECRET = b"s" * 32


@contextmanager
def joined(folder: Path, told: list[str], first: Callable[[Nodes], None]) -> Iterator[tuple[Leader, Follower]]:
    """What the leader reports is in `told`. `first` gets what the follower knows before it joins."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    nodes = [Nodes(2, number, "127.0.0.1", port, SECRET) for number in range(2)]
    with Requests() as of_leader, Requests() as of_follower:
        follower = Follower(nodes[1], JOB, of_follower, KeptMemories(0), lambda _: None)

        def join() -> None:
            first(nodes[1])
            follower.__enter__()

        joining = threading.Thread(target=join)
        joining.start()
        with Leader(nodes[0], 2, JOB, of_leader, str(folder), told.append) as leader:
            joining.join()
            yield leader, follower
            follower.__exit__()


def test_a_node_with_another_secret_ends_and_node_0_waits_on(tmp_path: Path) -> None:
    told: list[str] = []
    errors = []

    def come_with_another_secret(node: Nodes) -> None:
        with Requests() as requests, pytest.raises(PipelineError) as error:
            Follower(node._replace(secret=b"t" * 32), JOB, requests, KeptMemories(0), lambda _: None).__enter__()
        errors.append(str(error.value))

    with joined(tmp_path, told, come_with_another_secret):
        pass
    (error,) = errors
    assert error.endswith(": it refuses this node: the secrets differ; give all nodes the same")
    assert told[1:] == ["a connection from 127.0.0.1 was refused: the secrets differ; give all nodes the same"]


def test_a_node_that_has_much_to_say_before_its_ranks_are_gone_is_not_lost(tmp_path: Path) -> None:
    with joined(tmp_path, [], lambda _: None) as (leader, follower):

        def end() -> None:
            for _ in range(150):
                follower.send("report", rank=1, said="")
                time.sleep(0.01)  # each is a message that wakes node 0
            follower.send("ended", held=[[[0, 3]]])

        ending = threading.Thread(target=end)
        ending.start()
        leader.end()
        ending.join()
        assert leader.held == {1: {State(0, 3)}}
        assert list(leader.news()) == []  # else NodeLost
