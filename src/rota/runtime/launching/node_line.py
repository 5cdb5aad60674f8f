"""A node's line to another one: a thread passes on the messages that come, and silence is noticed.

{"kind": "alive"}   every `_BEAT_S`, both ways; a node that sends nothing for `SILENT_S` is lost
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, final

from rota.errors import FormatError
from rota.reading import Field
from rota.runtime.launching.secure_channel import Channel, ChannelError

_BEAT_S = 1.0
SILENT_S = 15


@final
class NodeLine:
    """Hands each message to `deliver`, on a thread; when no more can come, calls `lose` once with the reason.

    Silence is counted in looks of a second instead of by the clock: a process that was stopped itself has not listened.
    """

    def __init__(self, channel: Channel, deliver: Callable[[Field], None], lose: Callable[[str], None]) -> None:
        self.channel = channel
        self._deliver, self._lose = deliver, lose
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name="rota-node-line", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. If it cannot be sent, the other node is lost, which the thread reports."""
        try:
            self._send({"kind": kind, **fields})
        except ChannelError:
            self.channel.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        self.channel.send(message)

    def _listen(self) -> None:
        num_silent, sent_s = 0, 0.0
        try:
            while num_silent < SILENT_S:
                if time.monotonic() - sent_s >= _BEAT_S:
                    self._send({"kind": "alive"})
                    sent_s = time.monotonic()
                messages, has_come = self.channel.receive(_BEAT_S)
                num_silent = 0 if has_come else num_silent + 1
                for message in messages:
                    if message["kind"].text() != "alive":
                        self._deliver(message)
            why = f"it sent nothing for {SILENT_S} s"
        except ChannelError as error:
            why = str(error)
        except FormatError as error:
            why = f"it sent what this node does not understand: {error}"
        if not self._is_closed:
            self._lose(why)

    def close(self) -> None:
        """End the line, which is not a loss."""
        self._is_closed = True
        self.channel.close()
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout=1)


@final
class Mailbox:
    """What threads leave for the main thread, whose loop sees that something is there."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_closed = False
        self._lock = threading.Lock()  # no thread may write into what has the number of a closed file

    def put(self, item: Any) -> None:
        """Leave something."""
        self._items.put(item)
        self._wake()

    def _wake(self) -> None:
        with self._lock, suppress(BlockingIOError):  # full of such bytes
            if not self._is_closed:
                os.write(self._write, b"1")

    def fileno(self) -> int:
        """A file descriptor that is readable when something is there."""
        return self._read

    def taken(self) -> Iterator[Any]:
        """What is there, one after the other; what the caller does not take stays."""
        with suppress(BlockingIOError):
            os.read(self._read, 4096)
        try:
            while not self._items.empty():
                yield self._items.get()
        finally:
            if not self._items.empty():
                self._wake()

    def close(self) -> None:
        """Nothing that is left here is taken any more."""
        with self._lock:
            self._is_closed = True
            os.close(self._read)
            os.close(self._write)
