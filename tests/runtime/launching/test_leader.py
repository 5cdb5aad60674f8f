"""Node 0 and another node of a run, as two threads that talk over loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rota.runtime.launching.follower import Follower
from rota.runtime.launching.leader import Leader
from rota.runtime.launching.nodes import Nodes
from rota.runtime.launching.requests import Requests

JOB = {"plan": "the same"}


@contextmanager
def joined(folder: Path) -> Iterator[tuple[Leader, Follower]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    nodes = [Nodes(2, number, "127.0.0.1", port, b"s" * 32) for number in range(2)]
    told: list[str] = []
    with Requests() as of_leader, Requests() as of_follower:
        follower = Follower(nodes[1], JOB, of_follower, told.append)
        joining = threading.Thread(target=follower.__enter__)
        joining.start()
        with Leader(nodes[0], 2, JOB, of_leader, str(folder), told.append) as leader:
            joining.join()
            yield leader, follower
            follower.__exit__()


def test_a_node_that_has_much_to_say_before_its_ranks_are_gone_is_not_lost(tmp_path: Path) -> None:
    with joined(tmp_path) as (leader, follower):

        def end() -> None:
            for _ in range(150):
                follower.send("report", rank=1, said="")
                time.sleep(0.01)  # each is a message that wakes node 0
            follower.send("ended", steps=[3])

        ending = threading.Thread(target=end)
        ending.start()
        leader.end()
        ending.join()
        assert leader.steps == {3}
        assert list(leader.news()) == []  # else NodeLost
