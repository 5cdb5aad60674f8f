"""Node 0 and another node of a run, as two threads that talk over loopback."""

from __future__ import annotations

import errno
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rota import PipelineError
from rota.reading import Field
from rota.runtime.kept_memory import KeptMemories, State
from rota.runtime.launching.follower import Follower, _FollowersRanks, _run
from rota.runtime.launching.leader import Leader, News
from rota.runtime.launching.node_line import Mailbox
from rota.runtime.launching.node_starts import Start
from rota.runtime.launching.nodes import NodeLost, Nodes
from rota.runtime.launching.rank_processes import RankFailed
from rota.runtime.launching.requests import Requests
from rota.runtime.launching.stand_by import StandBy, StandByEndedError

JOB = {"plan": "the same"}
SECRET = b"s" * 32


@contextmanager
def joined(
    folder: Path, told: list[str], first: Callable[[Nodes], None] = lambda _: None, may_join_again: bool = False
) -> Iterator[tuple[Leader, Follower]]:
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
        with Leader(nodes[0], 2, JOB, of_leader, str(folder), told.append, may_join_again) as leader:
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
    with joined(tmp_path, []) as (leader, follower):

        def end() -> None:
            for number in range(150):
                follower.send("report", rank=1, said=f"{number}")
                time.sleep(0.01)  # each is a message that wakes node 0
            follower.send("ended", held=[[[0, 3]]])

        ending = threading.Thread(target=end)
        ending.start()
        reports = leader.end()
        ending.join()
        assert [report["said"].text() for report in reports] == [f"{number}" for number in range(150)]
        assert leader.held == {1: {State(0, 3)}}
        assert list(leader.news()) == []  # else NodeLost


@contextmanager
def waiting(leader: Leader, follower: Follower) -> Iterator[list[Start]]:
    """The follower waits for its starts, on a thread and with a stand-by that is ready: those that it was told."""
    starts: list[Start] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stand_by = ReadyStandBy(ours)
    theirs.send(b"ready")

    def wait() -> None:
        while (start := follower.next_start(stand_by)) is not None:  # type: ignore[arg-type]
            starts.append(start)

    thread = threading.Thread(target=wait)
    thread.start()
    with ours, theirs:
        yield starts
        leader._tell("over", how="done", signal=0, words="")
        thread.join()
        follower.__exit__()


class ReadyStandBy:
    """One that has imported everything, and says so once somebody looks."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line

    def has_message(self) -> bool:
        return True

    def note_ready(self) -> None:
        """It can fork ranks."""


def until(is_so: Callable[[], bool], leader: Leader | None) -> None:
    """Wait until it is so, and take what has happened meanwhile if a leader is given."""
    deadline_s = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline_s:
        assert leader is None or list(leader.news()) == []
        time.sleep(0.01)
    assert is_so()


def test_a_node_that_waits_for_its_start_has_no_ranks_to_end(tmp_path: Path) -> None:
    """Node 0 may end a start of which another node has not been told, because a third one is lost."""
    with joined(tmp_path, []) as (leader, follower), waiting(leader, follower):
        leader.end()
        assert list(leader.news()) == []


def test_a_lost_node_joins_again_and_another_does_not(tmp_path: Path) -> None:
    told: list[str] = []
    with joined(tmp_path, told, may_join_again=True) as (leader, follower):
        nodes = follower._nodes
        with Requests() as requests, KeptMemories(0) as memories:

            def come(job: dict[str, str]) -> Follower:
                again = Follower(nodes, job, requests, memories, lambda _: None, may_join_again=True)
                joining = threading.Thread(target=lambda: errors_of(again, errors))
                errors.clear()
                joining.start()
                until(lambda: not joining.is_alive(), leader)
                return again

            errors: list[str] = []
            come(JOB)
            assert "--node 1 is taken or too large" in errors[0]
            assert "or wait 15 s for the loss of node 1 to be noticed" in errors[0]

            follower.__exit__()
            with pytest.raises(NodeLost, match=r"node 1 \(127\.0\.0\.1\) is lost: its connection was closed") as lost:
                until(lambda: False, leader)
            assert lost.value.node == 1
            assert not leader.can_start_on(1)
            come({"plan": "another"})
            assert "its plan differs from node 0's" in errors[0]
            again = come(JOB)
            assert errors == []
            assert told[-1] == "node 1 (127.0.0.1) has joined again"
            assert not leader.can_start_on(1)  # it may still import PyTorch
            leader.prepare(Start(4, [0]))
            leader.start()
            with waiting(leader, again) as starts:
                until(lambda: leader.can_start_on(1), leader)
                leader.prepare(Start(5, [0, 1], [1]))
                leader.start()
                until(lambda: len(starts) == 1, leader)
                assert starts == [Start(5, (0, 1), (1,))]  # not the one before, in which it had no ranks


def test_a_node_that_is_back_while_the_ranks_end_has_none_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss and its greeting are found at once; what its former line still brings is not its word any more."""
    monkeypatch.setattr("rota.runtime.launching.leader._END_S", 5)
    with joined(tmp_path, [], may_join_again=True) as (leader, follower):
        (former,) = leader._lines.values()
        follower.__exit__()
        until(lambda: leader._over[1].is_set(), None)  # its loss is in the mailbox
        with Requests() as requests, KeptMemories(0) as memories:
            again = Follower(follower._nodes, JOB, requests, memories, lambda _: None, may_join_again=True)
            joining = threading.Thread(target=again.__enter__)
            joining.start()
            until(lambda: leader._mailbox._items.qsize() == 2, None)
            leader.end()
            joining.join()
            (line,) = leader._lines.values()
            assert line is not former
            assert again._joins_again
            end = Field("end", {"kind": "end", "rank": 1, "code": 0})
            leader._mailbox.put(News(1, former, end))
            leader._mailbox.put(News(1, former, None, "it has gone"))
            with pytest.raises(NodeLost):
                list(leader.news())  # of the first loss
            assert list(leader.news()) == []
            assert [*leader._there()] == [(1, line)]
            leader._tell("over", how="done", signal=0, words="")
            again.__exit__()


def test_a_node_that_cannot_fork_ranks_does_not_join_again(tmp_path: Path) -> None:
    with joined(tmp_path, []) as (_, follower):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            theirs.close()
            stand_by = StandBy({}, True, follower._requests, lambda _: None)
            stand_by.line = ours
            follower._joins_again = True
            with pytest.raises(PipelineError, match="the process that ranks are forked from has ended"):
                follower.next_start(stand_by)


def test_signals_to_a_node_that_has_not_started_its_ranks_yet_go_to_node_0(tmp_path: Path) -> None:
    with joined(tmp_path, []) as (leader, follower):
        ranks = _FollowersRanks(None, follower._requests, follower, [0])  # type: ignore[arg-type]
        follower._requests.note(signal.SIGTERM)
        ranks._handle_signals_at_start()
        select.select([leader._requests], [], [], 60)
        assert leader._requests.taken() == [signal.SIGTERM]


def test_signals_while_a_node_forks_its_ranks_go_to_node_0(tmp_path: Path) -> None:
    with joined(tmp_path, []) as (leader, follower):
        ranks = _FollowersRanks(None, follower._requests, follower, [0])  # type: ignore[arg-type]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told: list[signal.Signals] = []

        def answer_once_node_0_knows() -> None:
            select.select([leader._requests], [], [], 60)
            told.extend(leader._requests.taken())
            theirs.close()

        with ours:
            stand_by = StandBy({}, True, follower._requests, lambda _: None)
            stand_by.line = ours
            follower._requests.note(signal.SIGTERM)
            answering = threading.Thread(target=answer_once_node_0_knows)
            answering.start()
            with pytest.raises(StandByEndedError):  # and not EndedBySignal, which would lose this node
                ranks._fork(stand_by, ["module"], [{}], [])
            answering.join()
        assert told == [signal.SIGTERM]


@pytest.mark.parametrize("error", [RankFailed("no process"), PipelineError("no process")])
def test_a_node_whose_new_ranks_cannot_be_started_is_lost_alone(tmp_path: Path, error: Exception) -> None:
    def fork() -> None:
        raise error

    with joined(tmp_path, [], may_join_again=True) as (leader, follower):
        ranks = _FollowersRanks(None, follower._requests, follower, [1])  # type: ignore[arg-type]
        with pytest.raises(PipelineError, match="no process"):
            _run(ranks, follower, fork, are_new=True)
        follower.__exit__()
        with pytest.raises(NodeLost):  # and not that its ranks have failed, which may end the run
            until(lambda: False, leader)


def test_a_loss_is_told_once(tmp_path: Path) -> None:
    with joined(tmp_path, [], may_join_again=True) as (leader, follower):
        assert leader.taken_loss() is None
        follower.__exit__()
        leader.end()
        lost = leader.taken_loss()
        assert lost is not None
        assert lost.node == 1
        assert leader.taken_loss() is None
        assert list(leader.news()) == []


def test_nodes_can_join_after_node_0_lacked_something(tmp_path: Path) -> None:
    nodes = Nodes(2, 0, "127.0.0.1", 5, SECRET)
    with Requests() as requests:
        leader = Leader(nodes, 2, JOB, requests, str(tmp_path), lambda _: None)
        leader._mailbox, leader._is_open = Mailbox(), True
        listener = PoorListener(leader)
        leader._accept(listener)  # type: ignore[arg-type]
        until(lambda: not leader._mailbox._items.empty(), None)
        leader._mailbox.close()
    assert listener.num_tries == 2


class PoorListener:
    """It has no file descriptors left at first, and accepts one connection then, which ends."""

    def __init__(self, leader: Leader) -> None:
        self._leader, self.num_tries = leader, 0

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        self.num_tries += 1
        if self.num_tries == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        self._leader._is_open = False
        one, other = socket.socketpair()
        other.close()
        return one, ("127.0.0.1", 1)


def errors_of(follower: Follower, errors: list[str]) -> None:
    try:
        follower.__enter__()
    except PipelineError as error:
        errors.append(str(error))
