"""A node of a run that does not lead: it joins node 0, starts its ranks when told to, and reports what they do.

joins ──▶ waits ──"start"──▶ its ranks run ──"end"──▶ kills them, "ended" ──▶ waits … ──"over"──▶ the command ends

`leader` has the messages. If node 0 is lost, this node's ranks are killed and the command ends.
"""

from __future__ import annotations

import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, final

from rota import reading
from rota.errors import PipelineError
from rota.plan import Plan
from rota.reading import Field
from rota.runtime.control import Message
from rota.runtime.kept_memory import KeptMemories
from rota.runtime.launcher_files import report_changed_script, restart_environment, write_plan
from rota.runtime.launching.meeting_store import FollowersStore, StoreServer
from rota.runtime.launching.node_line import Mailbox, NodeLine
from rota.runtime.launching.node_starts import Start
from rota.runtime.launching.nodes import JOIN_S, Nodes
from rota.runtime.launching.rank_processes import RankFailed, RankOfRun, Ranks
from rota.runtime.launching.requests import EndedBySignal, Requests
from rota.runtime.launching.run_folder import Folder
from rota.runtime.launching.secure_channel import MOST_BYTES, Channel, ChannelError, RefusedError, greet_leader
from rota.runtime.launching.stand_by import StandBy

_AGAIN_S = 0.2
_CONNECT_S = 5.0


class Ordered(Exception):
    """Node 0 ends this start of the ranks."""


class LeaderLost(PipelineError):
    """Node 0 does not answer any more."""


class _Over(NamedTuple):
    """How node 0 says that the run has ended."""

    how: str
    number: int
    words: str


@final
class Follower:
    """The line to node 0, as a context manager: on entry this node joins.

    Args:
        nodes: which node this is.
        job: what all nodes must have in common.
        requests: signals to this process, which node 0 hears of.
        memories: those of this node's processes.
        report: called with a line while node 0 cannot be reached, or if this node has something to say.
        may_join_again: whether the others may go on without this node.
    """

    def __init__(
        self,
        nodes: Nodes,
        job: dict[str, str],
        requests: Requests,
        memories: KeptMemories,
        report: Callable[[str], None],
        may_join_again: bool = False,
    ) -> None:
        self._nodes, self._job, self._requests, self.report = nodes, job, requests, report
        self.memories, self._may_join_again = memories, may_join_again
        self._stack = ExitStack()
        self._over: _Over | None = None
        self._lost: str | None = None
        self._has_told_ready = False
        self._joins_again = False
        self.store = FollowersStore(lambda number, request: self.send("ask", number=number, request=request))

    def __enter__(self) -> Follower:
        with ExitStack() as stack:
            self._mailbox = Mailbox()
            stack.callback(self._mailbox.close)
            channel = self._joined()
            self._line = NodeLine(channel, self._deliver, self._lose)
            stack.callback(self._line.close)
            self._line.start()
            self.send("job", node=self._nodes.node, job=self._job)
            welcome = self._next("welcome")
            self._joins_again = welcome is not None and welcome["again"].value is True
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _joined(self) -> Channel:
        """Connect until node 0 answers. Raises PipelineError if it refuses this node, or does not answer in time."""
        where = f"{reading.printable(self._nodes.host)}:{self._nodes.port}"
        deadline_s, why = time.monotonic() + JOIN_S, ""
        while time.monotonic() < deadline_s:
            self._requests.end_if_asked("before node 0 was reached")
            try:
                return self._connected()
            except RefusedError as error:
                raise PipelineError(f"node 0 at {where}: {error}") from None
            except (ChannelError, OSError) as error:
                found = str(error.strerror or error) if isinstance(error, OSError) else str(error)
                if found != why:
                    self.report(f"waits for node 0 at {where}: {found}")
                why = found
            select.select([self._requests], [], [], _AGAIN_S)
        raise PipelineError(f"node 0 at {where} has not answered within {JOIN_S:g} s: {why}; look at the command there")

    def _connected(self) -> Channel:
        connection = socket.create_connection((self._nodes.host, self._nodes.port), _CONNECT_S)
        try:
            return greet_leader(connection, self._nodes.secret)
        except BaseException:
            connection.close()
            raise

    # --- on the thread of the line --------------------------------------------------------------------------------

    def _deliver(self, message: Field) -> None:
        match message["kind"].text():
            case "put":
                self.store.note(message)
            case "answer":
                self.store.answer(message)
            case "start":
                self.store.begin(message["number"].integer(0))  # before values of this start come
                self._mailbox.put(message)
            case _:
                self._mailbox.put(message)

    def _lose(self, why: str) -> None:
        self._mailbox.put(why)

    # --- the run --------------------------------------------------------------------------------------------------

    @property
    def own_address(self) -> str:
        """By which the other nodes reach this one."""
        return self._line.channel.own_address

    def fileno(self) -> int:
        """A file descriptor that is readable when node 0 has told something."""
        return self._mailbox.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Tell node 0 something."""
        self._line.send(kind, **fields)

    def send_signal(self, number: signal.Signals) -> None:
        """Let node 0 handle a signal to this process."""
        self.send("signal", number=int(number))

    def next_start(self, stand_by: StandBy) -> Start | None:
        """Wait for the next start of the ranks; None if the run has ended, see `finish`.

        Node 0 hears when they can be forked from the stand-by.
        """
        message = self._next("start", stand_by)
        return None if message is None else Start.from_message(message)

    def _next(self, kind: str, stand_by: StandBy | None = None) -> Field | None:
        while self._over is None:
            files = [self.fileno(), self._requests.fileno()]
            awaited = None if self._has_told_ready else stand_by
            if awaited is not None:
                files.append(awaited.line.fileno())
            select.select(files, [], [])
            if awaited is not None and awaited.has_message():
                if self._joins_again:  # a stand-by that is of no use ends this command, and not the run of the others
                    awaited.note_ready()
                self._has_told_ready = True
                self.send("ready")
            for number in self._requests.taken():
                self.send_signal(number)
            for message in self.orders():
                if message["kind"].text() == kind:
                    return message
                if message["kind"].text() == "end":
                    self.send_ended()  # node 0 could not start its own
        if kind == "welcome":
            self.finish()
        return None

    def send_ended(self) -> None:
        """Tell node 0 that no rank of this node is left, and which states each one's memory holds."""
        self.send("ended", held=[sorted(states) for states in self.memories.held()])

    def orders(self) -> Iterator[Field]:
        """What node 0 tells, but not that the run is over: that ends the orders. Raises LeaderLost."""
        for message in self._mailbox.taken():
            if isinstance(message, str):
                self._lost = message
            elif message["kind"].text() == "over":
                words = message["words"].text()
                self._over = _Over(message["how"].text(), message["signal"].integer(0, 64), words)
                return
            else:
                yield message
        if self._lost is not None and self._over is None:
            remedy = "start the command again on all nodes: it goes on from the last checkpoint"
            if self._may_join_again:
                remedy = f"if the run goes on there, start the same command here, and it joins again; if not, {remedy}"
            raise LeaderLost(
                f"node 0 ({reading.printable(self._nodes.host)}) is lost: {self._lost}; the ranks of this node were "
                f"ended; {remedy}"
            )

    @property
    def is_over(self) -> bool:
        """Whether node 0 has told that the run has ended."""
        return self._over is not None

    def finish(self) -> signal.Signals | None:
        """The signal that asked all ranks to end after a step, if any, once the run has ended.

        Raises:
            PipelineError, EndedBySignal, KeyboardInterrupt: as node 0 has ended.
        """
        assert self._over is not None
        how, number, words = self._over
        if how == "done":
            return signal.Signals(number) if number else None
        if how == "signal" and number == signal.SIGINT:
            raise KeyboardInterrupt
        if how == "signal":
            raise EndedBySignal(signal.Signals(number), " to the run's node 0, or to another one")
        raise PipelineError(f"node 0 has ended the run: {reading.printable(words)}")

    def send_records(self, folder: str, start: int) -> None:
        """Send what the ranks of this node have left for the run's timeline."""
        for path in sorted(Path(folder).glob(f"*.restart{start}.rank*.json")):
            text = path.read_text()
            if 2 * len(text) > MOST_BYTES:
                self.report(f"the times of {path.name} are too many to send, so the run has no timeline")
                continue
            self.send("record", name=path.name, text=text)


@final
class _FollowersRanks(Ranks):
    """The ranks of this node: what they do is reported, and node 0 decides."""

    def __init__(self, folder: Folder, requests: Requests, follower: Follower, numbers: Sequence[int]) -> None:
        super().__init__(folder, requests, numbers=numbers)
        self._follower = follower
        self._is_interrupted = False

    def __enter__(self) -> _FollowersRanks:
        super().__enter__()
        self._selector.register(self._follower, selectors.EVENT_READ, self._follower)
        return self

    def follow(self) -> NoReturn:
        """Report until node 0 ends this start. Raises Ordered then, LeaderLost if node 0 is lost."""
        while True:
            self._wait_for_event()
            self._handle_signals_at_start()

    def _handle_signals_at_start(self) -> None:
        for number in self._requests.taken():
            self._handle_signal(number)

    def _handle_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._is_interrupted:  # node 0 may not answer
            raise KeyboardInterrupt
        self._is_interrupted = self._is_interrupted or number == signal.SIGINT
        self._follower.send_signal(number)

    def _note_elsewhere(self) -> None:
        for message in self._follower.orders():
            match message["kind"].text():
                case "end":
                    raise Ordered
                case "stop":
                    self._ask_to_stop()
                case "terminate":
                    self._send_term()
        if self._follower.is_over:
            raise Ordered

    def _note(self, rank: RankOfRun, message: Message) -> None:
        self._follower.send("report", rank=rank.number, said=message.to_bytes().decode())

    def _note_code(self, rank: RankOfRun, code: int) -> None:
        super()._note_code(rank, code)
        self._follower.send("end", rank=rank.number, code=code)


def follow(
    follower: Follower,
    nodes: Nodes,
    plan: Plan,
    sizes: tuple[int, int, int],
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Folder,
    requests: Requests,
    stand_by: StandBy,
) -> signal.Signals | None:
    """Start this node's ranks whenever node 0 says so, until the run has ended.

    Args:
        follower: the line to node 0.
        nodes: which node this is.
        plan: what the ranks run.
        sizes: pp, dp and tp.
        command: the module that each rank runs, the script, and its arguments.
        environment: of all ranks.
        folder: of this node's run.
        requests: signals to this process.
        stand_by: from which the ranks are forked.

    Returns:
        The signal that asked the ranks to end, if any.

    Raises:
        PipelineError, EndedBySignal, KeyboardInterrupt: the run has failed, or node 0 is lost.
    """
    num_processes, memories = sizes[0] * sizes[1] * sizes[2], follower.memories
    with StoreServer(folder.path, follower.store):
        while (start := follower.next_start(stand_by)) is not None:
            here = start.ranks_on(nodes.node, nodes, num_processes)
            for number in {*range(len(memories.files))}.difference(here.values()):
                memories.forget(number)  # of a rank that is lost
            with _FollowersRanks(folder, requests, follower, [*here]) as ranks:
                if start.number:
                    report_changed_script(command[1], folder.path, follower.report)
                of_start = {**environment, **write_plan(start.plan or plan, folder.path)}
                of_start |= restart_environment(start.number)
                each = start.environments(nodes, sizes, folder.path, follower.own_address)
                environments = [of_start | of_rank for of_rank in each]
                files = [[memories.files[number]] for number in here.values()] if memories.files else []
                are_new = all(start.members[rank] in start.new for rank in here)
                _run(ranks, follower, partial(ranks.fork, stand_by, command, environments, files), are_new)
            follower.send_records(folder.path, start.number)
            follower.send_ended()
    return follower.finish()


def _run(ranks: _FollowersRanks, follower: Follower, fork: Callable[[], None], are_new: bool) -> None:
    """Start the ranks and report what they do until node 0 ends this start.

    `are_new`: all of them were lost before, so the others can go on without them. Raises PipelineError if they cannot
    be started then: this node is lost again.
    """
    with suppress(Ordered):
        try:
            fork()
        except (LeaderLost, EndedBySignal):
            raise
        except (RankFailed, PipelineError) as error:
            if are_new:
                raise PipelineError(str(error)) from None
            follower.send("failed", words=str(error), again=isinstance(error, RankFailed))
        ranks.follow()
