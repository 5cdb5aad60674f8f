"""Node 0 of a run: it waits until the other nodes have joined, tells them what to do, and hears what happens there.

    leader ──▶ follower                              follower ──▶ leader
    welcome                it has joined (again)     job       which node it is, and what it would run
    start    see `Start`   start your ranks          ready     its ranks can be forked at once
    stop                   ask a rank to end         report    what a rank reported, see `control`
    terminate              SIGTERM to your ranks     end       a rank ended, with its exit code
    end                    kill your ranks           failed    its ranks could not be started
    over     how           the run has ended         signal    Ctrl-C, SIGTERM …: as if sent to node 0
    put      key, value    the store has changed     record    a rank's times of the last steps
    answer   number        of a request              ended     its ranks are gone; the states in each one's memory
                                                     ask       a request to the store
Only this node decides. The memory of a node that is lost is gone. If the run can go on without it, the same command may
let it join again.
"""

from __future__ import annotations

import ipaddress
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, final

from rota import reading
from rota.errors import FormatError, PipelineError
from rota.reading import Field
from rota.runtime.kept_memory import State
from rota.runtime.launching.meeting_store import LeadersStore, StoreServer, answered
from rota.runtime.launching.node_line import SILENT_S, Mailbox, NodeLine
from rota.runtime.launching.node_starts import Start
from rota.runtime.launching.nodes import JOIN_S, NodeLost, Nodes, difference
from rota.runtime.launching.requests import Requests
from rota.runtime.launching.secure_channel import HANDSHAKE_S, Channel, ChannelError, greet_follower

_MOST_GREETINGS = 64  # at once, of whoever connects
_MOST_REPORTED = 10  # refused connections
_END_S = 90  # more than a node waits for its own ranks
_ACCEPT_AGAIN_S = 0.1
_REFUSED_S = 1.0  # for a node to read why
_RECORD = re.compile(r"[0-9a-f]{16}\.restart\d+\.rank\d+\.json")


class News(NamedTuple):
    """A message that came on a node's line; None for `message` if no more can come, and why."""

    node: int
    line: NodeLine
    message: Field | None
    why: str = ""


@final
class Leader:
    """The other nodes, as a context manager: on entry they join, on exit they are told how the run has ended.

    Args:
        nodes: which node this is.
        num_processes: of the whole run.
        job: what all nodes must have in common.
        requests: signals to this process, and those to other nodes.
        folder: where other nodes' records go.
        report: called with one line for each connection that is refused, and for a node that joins again.
        may_join_again: let nodes that were lost join again, for which the port stays open.
    """

    def __init__(
        self,
        nodes: Nodes,
        num_processes: int,
        job: dict[str, str],
        requests: Requests,
        folder: str,
        report: Callable[[str], None],
        may_join_again: bool = False,
    ) -> None:
        self._nodes, self._num_processes, self._job = nodes, num_processes, job
        self._requests, self._folder, self._report = requests, folder, report
        self._may_join_again = may_join_again
        self._lines: dict[int, NodeLine] = {}
        self._names: dict[int, str] = {}
        self._own_addresses: dict[int, str] = {}
        self._lost: set[int] = set()
        self._to_tell: dict[int, str] = {}  # nodes that are lost, of which the caller does not know yet, and why
        self._importing: set[int] = set()  # nodes that have joined again, but cannot fork ranks yet
        self._over: dict[int, threading.Event] = {}
        self._num_refused = 0
        self._is_open = False  # whether nodes can connect
        self._greetings = threading.Semaphore(_MOST_GREETINGS)
        self._stack = ExitStack()
        self.store = LeadersStore(self._spread)
        self._start = Start(0, range(num_processes))
        #: The states that each process of the other nodes holds in memory, after they ended.
        self.held: dict[int, set[State]] = {}

    # --- joining --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Leader:
        with ExitStack() as stack:
            self._mailbox = Mailbox()
            stack.callback(self._mailbox.close)
            stack.push(self._tell_end)
            with ExitStack() as open_port:
                listener = open_port.enter_context(_listening(self._nodes.host, self._nodes.port))
                open_port.callback(self._close, listener)
                self._is_open = True
                threading.Thread(target=self._accept, args=[listener], name="rota-nodes", daemon=True).start()
                self._await_all()
                if self._may_join_again:
                    stack.push(open_port.pop_all())
            stack.enter_context(StoreServer(self._folder, self.store))
            self._stack = stack.pop_all()
        return self

    def _await_all(self) -> None:
        others = {*range(1, self._nodes.num_nodes)}
        self._report(f"node 0 waits for {_listed(others)} at {self._nodes.host}:{self._nodes.port}")
        deadline_s = time.monotonic() + JOIN_S
        while missing := others - self._lines.keys():
            if time.monotonic() > deadline_s:
                raise PipelineError(
                    f"{_listed(missing)} has not joined within {JOIN_S:g} s; start the same command there with --node"
                )
            select.select([self._mailbox.fileno(), self._requests.fileno()], [], [], 1.0)
            self._requests.end_if_asked("before all nodes had joined")
            for item in self._mailbox.taken():
                if not isinstance(item, News):
                    self._welcome(item, is_begun=False)
                elif item.message is None and self._lines.get(item.node) is item.line:
                    del self._lines[item.node]  # it may come again

    def _accept(self, listener: socket.socket) -> None:
        while self._is_open:
            try:
                connection, address = listener.accept()
            except OSError:  # it is closed, or this machine lacks something, such as free file descriptors
                time.sleep(_ACCEPT_AGAIN_S)
                continue
            if not self._greetings.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._greet, args=[connection, address[0]], daemon=True).start()
            except RuntimeError:  # no more threads
                connection.close()
                self._greetings.release()

    def _close(self, listener: socket.socket) -> None:
        """End the thread that accepts connections."""
        self._is_open = False
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)

    def _greet(self, connection: socket.socket, address: str) -> None:
        """Let a node in, or whoever it is: until it has shown that it has the secret, it is a stranger."""
        try:
            channel = greet_follower(connection, self._nodes.secret)
            job = _first_message(channel)
            self._mailbox.put((channel, job["node"].integer(0), {k.text(): v.text() for k, v in job["job"].items()}))
        except (ChannelError, FormatError, OSError) as error:
            connection.close()
            self._mailbox.put((None, address, str(error)))
        finally:
            self._greetings.release()

    def _welcome(self, greeted: tuple[Channel | None, Any, Any], is_begun: bool) -> None:
        """Let a node join, or again once the run has begun; refuse it if its place is taken."""
        channel, node, job = greeted
        if channel is None:
            self._refused(f"a connection from {node} was refused: {job}")
            return
        found = difference(job, self._job)
        if node not in range(1, self._nodes.num_nodes) or (node in self._lines and node not in self._lost):
            most = self._nodes.num_nodes - 1
            why = f"--node {node} is taken or too large; give each node its own number, from 0 to {most}"
            if is_begun:
                why += f", or wait {SILENT_S} s for the loss of node {node} to be noticed"
        elif is_begun and found is not None:
            why = found
        else:
            line = self._add(channel, node)
            if found is not None:
                raise PipelineError(f"{self._names[node]} is refused: {found}")
            line.send("welcome", again=is_begun)
            return
        with suppress(ChannelError):
            channel.send({"kind": "over", "how": "error", "signal": 0, "words": why})
        self._refused(f"a node at {channel.other_address} was refused: {why}")
        channel.close_once_read(_REFUSED_S)

    def _add(self, channel: Channel, node: int) -> NodeLine:
        over = self._over[node] = threading.Event()
        line = NodeLine(
            channel, lambda message: self._deliver(node, line, message), lambda why: self._lose(node, line, why, over)
        )
        self._lines[node], self._names[node] = line, f"node {node} ({channel.other_address})"
        self._own_addresses[node] = channel.own_address
        if node in self._lost:
            self._lost.remove(node)
            self._importing.add(node)
            self._report(f"{self._names[node]} has joined again")
        line.start()
        return line

    def _refused(self, words: str) -> None:
        self._num_refused += 1
        if self._num_refused <= _MOST_REPORTED:
            self._report(words)

    # --- on the threads of the lines ------------------------------------------------------------------------------

    def _deliver(self, node: int, line: NodeLine, message: Field) -> None:
        kind = message["kind"].text()
        if kind == "ask":
            number = message["number"].integer()
            line.send("answer", number=number, **answered(self.store, message["request"]))
        elif kind == "signal":
            self._requests.note(message["number"].integer(1, 64))
        else:
            self._mailbox.put(News(node, line, message))

    def _lose(self, node: int, line: NodeLine, why: str, over: threading.Event) -> None:
        over.set()
        self._mailbox.put(News(node, line, None, why))

    def _spread(self, start: int, key: str, value: str | None) -> None:
        self._tell("put", start=start, key=key, value=value)

    # --- the run --------------------------------------------------------------------------------------------------

    @property
    def own_address(self) -> str:
        """By which the other nodes reach this one."""
        return self._own_addresses[1]

    def prepare(self, start: Start) -> None:
        """Take what the next start is to be."""
        self._start = start

    def ranks_elsewhere(self) -> dict[int, str]:
        """The number of each rank on another node in the next start, and the node's name."""
        nodes = [self._nodes.node_of(member, self._num_processes) for member in self._start.members]
        return {rank: self._names[node] for rank, node in enumerate(nodes) if node}

    def start(self) -> None:
        """Let the other nodes start their ranks. Raises NodeLost."""
        self._tell_lost()
        self.store.begin(self._start.number)
        for node, line in self._there():
            if node not in self._importing:  # else it has no ranks, and an empty memory
                line.send("start", **self._start.to_fields())

    def can_start_on(self, node: int) -> bool:
        """Whether ranks can be started on a node: it is there, and need not import what they need first."""
        return node not in self._lost and node not in self._importing

    def fileno(self) -> int:
        """A file descriptor that is readable when there is news."""
        return self._mailbox.fileno()

    def news(self) -> Iterator[tuple[str, Field]]:
        """What has happened on other nodes: the node's name, and its message. Raises NodeLost."""
        for news in self._mailbox.taken():
            if (message := self._kept(news)) is not None:
                yield self._names[news.node], message
        self._tell_lost()

    def stop(self) -> None:
        """Ask one rank of the other nodes to end all ranks after the step that is running."""
        self._tell("stop")

    def terminate(self) -> None:
        """SIGTERM to all ranks of the other nodes."""
        self._tell("terminate")

    def end(self) -> list[Field]:
        """Kill the ranks of the other nodes. Returns when they are gone, or their node is lost.

        Returns:
            What the ranks had still reported.
        """
        self._tell("end")
        waiting, reports = {*self._there()}, []
        self.held = {}
        deadline_s = time.monotonic() + _END_S
        while waiting and time.monotonic() < deadline_s:
            select.select([self._mailbox], [], [], 1.0)
            for news in self._mailbox.taken():
                message = self._kept(news)
                if message is not None and message["kind"].text() == "report":
                    reports.append(message)
                if message is not None and message["kind"].text() == "ended":
                    numbers = self._nodes.numbers(news.node, self._num_processes)
                    held = [{_state(state) for state in states} for states in message["held"]]
                    self.held |= zip(numbers, held, strict=False)  # none if no memory is kept
                    waiting.discard((news.node, news.line))
            waiting.intersection_update(self._there())  # a node that was lost has no ranks, even if it is there again
        for node, _ in waiting:
            self._note_lost(node, f"it has not ended its ranks within {_END_S} s")
        return reports

    def _kept(self, news: Any) -> Field | None:
        """The message, unless it is none for the caller."""
        if not isinstance(news, News):
            if self._may_join_again:
                self._welcome(news, is_begun=True)
            elif news[0] is not None:
                news[0].close()  # one too many, which came with the last node
            return None
        if (news.node, news.line) not in self._there():
            return None  # it has been lost since
        if news.message is None:
            self._note_lost(news.node, news.why)
        elif news.message["kind"].text() == "ready":
            self._importing.discard(news.node)
        elif news.message["kind"].text() == "record":
            name = news.message["name"].text()
            if _RECORD.fullmatch(name):
                Path(self._folder, name).write_text(news.message["text"].text())
        else:
            return news.message
        return None

    def _note_lost(self, node: int, why: str) -> None:
        if node in self._lost:
            return
        self._lost.add(node)
        self._importing.discard(node)
        self._over[node].set()
        self._lines[node].close()  # nothing waits for it any more
        if any(self._nodes.node_of(member, self._num_processes) == node for member in self._start.members):
            self._to_tell[node] = why
        else:
            self._report(f"{self._names[node]} is lost: {why}; it had no ranks")

    def _tell_lost(self) -> None:
        """Raises NodeLost for a node that is lost, once."""
        if (lost := self.taken_loss()) is not None:
            raise lost

    def taken_loss(self) -> NodeLost | None:
        """A node that is lost, once."""
        for node in [*self._to_tell]:
            return NodeLost(node, f"{self._names[node]} is lost: {self._to_tell.pop(node)}")
        return None

    def _tell(self, kind: str, **fields: Any) -> None:
        for _, line in self._there():
            line.send(kind, **fields)

    def _there(self) -> list[tuple[int, NodeLine]]:
        return [(node, line) for node, line in [*self._lines.items()] if node not in self._lost]

    # --- the end --------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _tell_end(self, _: object, error: BaseException | None, __: object) -> None:
        asked = self._requests.asked
        how, number, words = "done", int(asked or 0), ""
        if isinstance(error, KeyboardInterrupt):
            how, number = "signal", int(signal.SIGINT)
        elif error is not None:
            found = getattr(error, "number", None)
            how, number = ("signal", int(found)) if isinstance(found, signal.Signals) else ("error", 0)
            words = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        self._tell("over", how=how, signal=number, words=words)
        for node, line in self._lines.items():
            self._over[node].wait(_END_S)  # until it has closed the connection, or is lost
            line.close()


def _first_message(channel: Channel) -> Field:
    deadline_s = time.monotonic() + HANDSHAKE_S
    while time.monotonic() < deadline_s:
        messages, _ = channel.receive(1.0)
        for message in messages:
            if message["kind"].text() == "job":
                return message
    raise ChannelError("it does not say what it would run")


def _state(field: Field) -> State:
    if len(found := field.integers(0)) != 2:
        raise field.wrong("a training and a step")
    return State(*found)


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens at the address; on all interfaces if the host calls itself 127.0.1.1, as Debian does."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        named = host != "localhost" and not _is_address(host)
        if named and ipaddress.ip_address(address[0]).is_loopback:
            address = ("", port)
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise PipelineError(
            f"node 0 cannot listen at {reading.printable(host)}:{port}: {error.strerror}; give its own address and a "
            f"free port with --head HOST:PORT"
        ) from None


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _listed(nodes: set[int]) -> str:
    return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(map(str, sorted(nodes)))
