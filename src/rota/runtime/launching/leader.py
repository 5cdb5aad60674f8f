"""Node 0 of a run: it waits until the other nodes have joined, tells them what to do, and hears what happens there.

    leader ──▶ follower                              follower ──▶ leader
    welcome                it has joined             job       which node it is, and what it would run
    start    number        start your ranks          report    what a rank reported, see `control`
    terminate              SIGTERM to your ranks     end       a rank ended, with its exit code
    end                    kill your ranks           failed    its ranks could not be started
    over     how           the run has ended         signal    Ctrl-C, SIGTERM …: as if sent to node 0
    put      key, value    the store has changed     record    a rank's times of the last steps
    answer   number        of a request              ended     its ranks are gone; the states that they have in memory
                                                     ask       a request to the store
Only this node decides. A node that is lost ends the run: its ranks' memory is gone.
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
from rota.runtime.launching.node_line import Mailbox, NodeLine
from rota.runtime.launching.nodes import JOIN_S, Nodes, difference
from rota.runtime.launching.requests import Requests
from rota.runtime.launching.secure_channel import HANDSHAKE_S, Channel, ChannelError, greet_follower

_MOST_GREETINGS = 64  # at once, of whoever connects
_MOST_REPORTED = 10  # refused connections
_END_S = 90  # more than a node waits for its own ranks
_RECORD = re.compile(r"[0-9a-f]{16}\.restart\d+\.rank\d+\.json")


class NodeLost(PipelineError):
    """A node does not answer any more."""


class News(NamedTuple):
    """A message of a node; None for `message` if no more can come, and why."""

    node: int
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
        report: called with one line for each connection that is refused.
    """

    def __init__(
        self,
        nodes: Nodes,
        num_processes: int,
        job: dict[str, str],
        requests: Requests,
        folder: str,
        report: Callable[[str], None],
    ) -> None:
        self._nodes, self._num_processes, self._job = nodes, num_processes, job
        self._requests, self._folder, self._report = requests, folder, report
        self._lines: dict[int, NodeLine] = {}
        self._lost: dict[int, str] = {}
        self._over: dict[int, threading.Event] = {}
        self._num_refused = 0
        self._greetings = threading.Semaphore(_MOST_GREETINGS)
        self._stack = ExitStack()
        self.store = LeadersStore(self._spread)
        #: The number of the last start of the ranks.
        self.num_start = 0
        #: The states that all ranks of the other nodes hold in memory, after they ended.
        self.states: set[State] = set()

    # --- joining --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Leader:
        with ExitStack() as stack:
            self._mailbox = Mailbox()
            stack.callback(self._mailbox.close)
            stack.push(self._tell_end)
            with _listening(self._nodes.host, self._nodes.port) as listener:
                threading.Thread(target=self._accept, args=[listener], name="rota-nodes", daemon=True).start()
                try:
                    self._await_all()
                finally:
                    with suppress(OSError):
                        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
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
                if isinstance(item, News):
                    if item.message is None:
                        self._lines.pop(item.node, None)  # it may come again
                    continue
                self._welcome(*item)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, address = listener.accept()
                if not self._greetings.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(target=self._greet, args=[connection, address[0]], daemon=True).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        """Let a node in, or whoever it is: until it has shown that it has the secret, it is a stranger."""
        try:
            channel = greet_follower(connection, self._nodes.secret)
            job = _first_message(channel)
            self._mailbox.put((channel, job["node"].integer(0), {k.text(): v.text() for k, v in job["job"].items()}))
        except (ChannelError, FormatError) as error:
            connection.close()
            self._mailbox.put((None, address, str(error)))
        finally:
            self._greetings.release()

    def _welcome(self, channel: Channel | None, node: Any, job: Any) -> None:
        if channel is None:
            self._refused(f"a connection from {node} was refused: {job}")
            return
        if node not in range(1, self._nodes.num_nodes) or node in self._lines:
            most = self._nodes.num_nodes - 1
            words = f"--node {node} is taken or too large; give each node its own number, from 0 to {most}"
            with suppress(ChannelError):
                channel.send({"kind": "over", "how": "error", "signal": 0, "words": words})
            self._refused(f"a node at {channel.other_address} was refused: {words}")
            return
        over = self._over[node] = threading.Event()
        line = NodeLine(channel, lambda message: self._deliver(node, message), lambda why: self._lose(node, why, over))
        self._lines[node] = line
        line.start()
        if (found := difference(job, self._job)) is not None:
            raise PipelineError(f"{self._name(node)} is refused: {found}")
        line.send("welcome")

    def _refused(self, words: str) -> None:
        self._num_refused += 1
        if self._num_refused <= _MOST_REPORTED:
            self._report(words)

    # --- on the threads of the lines ------------------------------------------------------------------------------

    def _deliver(self, node: int, message: Field) -> None:
        kind = message["kind"].text()
        if kind == "ask":
            number = message["number"].integer()
            self._lines[node].send("answer", number=number, **answered(self.store, message["request"]))
        elif kind == "signal":
            self._requests.note(message["number"].integer(1, 64))
        else:
            self._mailbox.put(News(node, message))

    def _lose(self, node: int, why: str, over: threading.Event) -> None:
        over.set()
        self._mailbox.put(News(node, None, why))

    def _spread(self, start: int, key: str, value: str | None) -> None:
        self._tell("put", start=start, key=key, value=value)

    # --- the run --------------------------------------------------------------------------------------------------

    @property
    def own_address(self) -> str:
        """By which the other nodes reach this one."""
        return self._lines[1].channel.own_address

    def ranks_elsewhere(self) -> dict[int, str]:
        """The number of each rank on another node, and the node's name."""
        return {
            number: self._name(node)
            for node in range(1, self._nodes.num_nodes)
            for number in self._nodes.numbers(node, self._num_processes)
        }

    def start(self, number: int) -> None:
        """Let the other nodes start their ranks; `number` is that of the start. Raises NodeLost."""
        self._refuse_lost()
        self.num_start = number
        self.store.begin(number)
        self._tell("start", number=number)

    def fileno(self) -> int:
        """A file descriptor that is readable when there is news."""
        return self._mailbox.fileno()

    def news(self) -> Iterator[tuple[str, Field]]:
        """What has happened on other nodes: the node's name, and its message. Raises NodeLost."""
        for news in self._mailbox.taken():
            if (message := self._kept(news)) is not None:
                yield self._name(news.node), message
        self._refuse_lost()

    def terminate(self) -> None:
        """SIGTERM to all ranks of the other nodes."""
        self._tell("terminate")

    def end(self) -> None:
        """Kill the ranks of the other nodes. Returns when they are gone, or their node is lost."""
        self._tell("end")
        waiting = self._lines.keys() - self._lost.keys()
        held: list[set[State]] = []
        deadline_s = time.monotonic() + _END_S
        while waiting and time.monotonic() < deadline_s:
            select.select([self._mailbox], [], [], 1.0)
            for news in self._mailbox.taken():
                message = self._kept(news)
                if message is not None and message["kind"].text() == "ended":
                    held.append({_state(state) for state in message["states"]})
                    waiting.discard(news.node)
            waiting -= self._lost.keys()
        for node in waiting:
            self._lost[node] = f"it has not ended its ranks within {_END_S} s"
        self.states = set.intersection(*held) if held else set()

    def _kept(self, news: Any) -> Field | None:
        """The message, unless it is none for the caller."""
        if not isinstance(news, News):
            if news[0] is not None:
                news[0].close()  # one too many, which came with the last node
            return None
        if news.message is None:
            self._lost.setdefault(news.node, news.why)
        elif news.message["kind"].text() == "record":
            name = news.message["name"].text()
            if _RECORD.fullmatch(name):
                Path(self._folder, name).write_text(news.message["text"].text())
        else:
            return news.message
        return None

    def _refuse_lost(self) -> None:
        for node, why in self._lost.items():
            raise NodeLost(
                f"{self._name(node)} is lost: {why}; all ranks were ended. Start the command again on all nodes: it "
                f"goes on from the last checkpoint"
            )

    def _tell(self, kind: str, **fields: Any) -> None:
        for line in [*self._lines.values()]:
            line.send(kind, **fields)

    def _name(self, node: int) -> str:
        return f"node {node} ({self._lines[node].channel.other_address})"

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
