"""The store of `torch.distributed` for ranks on several nodes, whose supervisors answer. No pickle, no port.

Each thread has its own connection, so one that waits holds up no other. Nothing waits at the supervisor: a rank looks
again until the key is there.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from rota.runtime.environment import AT_SUPERVISOR, MOST_STORE_BYTES

_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.05
_CODE = "latin-1"  # any bytes as text, one character each
_made: list[NodeStore] = []  # PyTorch keeps only its own half of a store, and calls the other


def at(where: str) -> Store:
    """The store that the launcher told of: a file, or at the supervisor."""
    if not where.startswith(AT_SUPERVISOR):
        return FileStore(where, -1)
    start, path = where.removeprefix(AT_SUPERVISOR).split(":", 1)
    _made.append(NodeStore(path, int(start)))
    return _made[-1]


@final
class NodeStore(Store):
    """A store at the supervisor's socket `path`, of the ranks' start with this number."""

    def __init__(self, path: str, start: int) -> None:
        super().__init__()
        self._path, self._start = path, start
        self._of_thread = threading.local()

    def clone(self) -> NodeStore:
        """The same store: threads do not share connections."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._ask("set", key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        """The value, once there is one."""
        return self._await(key, None)

    def add(self, key: str, value: int) -> int:
        """Add to a number, which begins with 0; returns the sum."""
        number: int = self._ask("add", key=key, by=value)
        return number

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a value if it is the expected one, or if it is "" and there is none; returns what is there then."""
        found: str = self._ask("compare_set", key=key, expected=_text(expected_value), value=_text(desired_value))
        return found.encode(_CODE)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        found: bool = self._ask("check", keys=[*keys])
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        for key in keys:
            self._await(key, timeout)

    def delete_key(self, key: str) -> bool:
        """Remove a value; returns whether there was one."""
        found: bool = self._ask("delete", key=key)
        return found

    def num_keys(self) -> int:
        """How many values there are."""
        number: int = self._ask("count")
        return number

    deleteKey, getNumKeys = delete_key, num_keys  # names by which PyTorch calls them

    def _await(self, key: str, timeout: timedelta | None) -> bytes:
        own: timedelta = self.timeout  # type: ignore[attr-defined]
        limit_s = (own if timeout is None else timeout).total_seconds()
        deadline_s, look_s = time.monotonic() + limit_s, _SHORTEST_LOOK_S
        while (found := self._ask("get", key=key)) is None:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the store has no {key!r} after {limit_s:g} s")
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)
        value: str = found
        return value.encode(_CODE)

    def _ask(self, do: str, **fields: Any) -> Any:
        request = json.dumps({"do": do, "start": self._start, **fields}).encode()
        if len(request) > MOST_STORE_BYTES:
            raise RuntimeError(
                f"a store on several nodes takes {MOST_STORE_BYTES:,} bytes per value, not {len(request):,}"
            )
        line = self._line()
        line.send(request)
        if not (data := line.recv(MOST_STORE_BYTES)):
            raise RuntimeError("the supervisor of this node has closed the store")
        reply = json.loads(data)
        if reply["error"] is not None:
            raise RuntimeError(f"the store: {reply['error']}")
        return reply["answer"]

    def _line(self) -> socket.socket:
        if not hasattr(self._of_thread, "line"):
            self._of_thread.line = _Line(self._path)
        own: _Line = self._of_thread.line
        return own.socket


@final
class _Line:
    """A connection that is closed when its thread ends."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(path)

    def __del__(self) -> None:
        self.socket.close()


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else value).decode(_CODE)
