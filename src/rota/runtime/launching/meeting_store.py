"""The store in which the ranks of several nodes find each other: the leader has it, every follower has a copy.

rank ── Unix socket in the run's folder ──▶ its supervisor   reads: from its own copy
                                                 │           writes: by the leader, which tells all before it answers
                                                 └── the nodes' authenticated channel ──▶ leader

Keys and values are for `torch.distributed`, see `rota.runtime.node_store`. Each start of the ranks begins with an empty
store, and what ranks of an earlier start still ask for is refused.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, final

from rota import reading
from rota.errors import FormatError, PipelineError
from rota.reading import Field
from rota.runtime.environment import AT_SUPERVISOR, MOST_STORE_BYTES

_SOCKET = "store"
_ANSWER_S = 60.0  # for the leader's answer; a leader that is gone is noticed before
_WRITES = ("set", "add", "compare_set", "delete")


def address(folder: str, start: int) -> str:
    """What `node_store.at` takes: the server in this folder, and the number of the start whose store it is."""
    return f"{AT_SUPERVISOR}{start}:{Path(folder, _SOCKET)}"


class StoreError(Exception):
    """A request that cannot be answered."""


class Store(Protocol):
    """What `serve` needs."""

    def act(self, request: Field) -> Any:
        """Answer a request: a JSON value. Raises StoreError, FormatError."""


class _Values:
    """The keys and values of one start."""

    def __init__(self) -> None:
        self._start = -1
        self._entries: dict[str, str] = {}
        self._lock = threading.Lock()

    def begin(self, start: int) -> None:
        """Forget everything: a new start of the ranks begins, unless it has begun."""
        with self._lock:
            self._begin(start)

    def _begin(self, start: int) -> None:
        if start > self._start:
            self._start, self._entries = start, {}

    def _read(self, request: Field) -> Any:
        with self._lock:
            self._require_start(request)
            match request["do"].text():
                case "get":
                    return self._entries.get(request["key"].text())
                case "check":
                    return all(key.text() in self._entries for key in request["keys"])
                case "count":
                    return len(self._entries)
        raise StoreError(f"no request: {reading.short(request['do'].value)}")

    def _require_start(self, request: Field) -> None:
        if request["start"].integer() != self._start:
            raise StoreError("the ranks were started again")


@final
class LeadersStore(_Values):
    """The store itself. `spread` tells all followers a new value, None if the key is gone."""

    def __init__(self, spread: Callable[[int, str, str | None], None]) -> None:
        super().__init__()
        self._spread = spread

    def act(self, request: Field) -> Any:
        """Answer a request."""
        if request["do"].value not in _WRITES:
            return self._read(request)
        with self._lock:
            self._require_start(request)
            return self._write(request, request["key"].text())

    def _write(self, request: Field, key: str) -> Any:
        found = self._entries.get(key)
        match request["do"].text():
            case "set":
                self._put(key, request["value"].text())
                return None
            case "add":
                if found is not None and not found.removeprefix("-").isdecimal():
                    raise StoreError(f"{reading.short(key)} is not a number")
                number = int(found or 0) + request["by"].integer()
                self._put(key, str(number))
                return number
            case "compare_set":
                expected, desired = request["expected"].text(), request["value"].text()
                if found is None and expected:
                    return expected
                if found is None or found == expected:
                    self._put(key, desired)
                    return desired
                return found
        if found is not None:
            del self._entries[key]
            self._spread(self._start, key, None)
        return found is not None

    def _put(self, key: str, value: str) -> None:
        self._entries[key] = value
        self._spread(self._start, key, value)  # under the lock, so that all see the same order


@final
class FollowersStore(_Values):
    """A copy, which `note` keeps up to date. `ask` sends a request with a number to the leader; `answer` is its end."""

    def __init__(self, ask: Callable[[int, dict[str, Any]], None]) -> None:
        super().__init__()
        self._ask = ask
        self._num_asked = 0
        self._waiting: dict[int, queue.SimpleQueue[Field]] = {}

    def note(self, message: Field) -> None:
        """Take over a value that the leader has."""
        with self._lock:
            self._begin(start := message["start"].integer(0))  # another node may have been told of it before
            if start != self._start:
                return
            key, value = message["key"].text(), message["value"]
            if value.value is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = value.text()

    def answer(self, message: Field) -> None:
        """Take the leader's answer to a request."""
        with self._lock:
            waiting = self._waiting.pop(message["number"].integer(), None)
        if waiting is not None:
            waiting.put(message)

    def act(self, request: Field) -> Any:
        """Answer a request, after the leader if it changes something."""
        if request["do"].value not in _WRITES:
            return self._read(request)
        reply: queue.SimpleQueue[Field] = queue.SimpleQueue()
        with self._lock:
            self._num_asked += 1
            number = self._num_asked
            self._waiting[number] = reply
        self._ask(number, request.value)
        try:
            message = reply.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise StoreError("the first node does not answer") from None
        if message["error"].value is not None:
            raise StoreError(message["error"].text())
        return message["answer"].value


def answered(store: Store, request: Field) -> dict[str, Any]:
    """The answer to a request as JSON fields: "answer", and "error" or None."""
    try:
        return {"answer": store.act(request), "error": None}
    except (StoreError, FormatError) as error:
        return {"answer": None, "error": str(error)}


@final
class StoreServer:
    """Answers the ranks of this node at a Unix socket in a folder, until it is closed: a thread per connection.

    Raises PipelineError if the folder's path is too long for that.
    """

    def __init__(self, folder: str, store: Store) -> None:
        self._store, path = store, Path(folder, _SOCKET)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(str(path))
        except OSError as error:
            self._listener.close()
            raise PipelineError(f"no socket can be made at {path}: {error}; set TMPDIR to a shorter path") from None
        self._listener.listen(1024)
        threading.Thread(target=self._accept, name="rota-store", daemon=True).start()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[connection], name="rota-store", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(MOST_STORE_BYTES):
                try:
                    fields = answered(self._store, Field("request", reading.load(data.decode())))
                except (FormatError, UnicodeDecodeError) as error:
                    fields = {"answer": None, "error": str(error)}
                connection.send(json.dumps(fields).encode())
