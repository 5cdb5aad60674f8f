"""What a rank and its supervisor report to each other: JSON over a pair of sockets that only these two processes have.

rank ──▶ supervisor     "joins"    it begins to wait for all ranks to join
                        "opens"    it begins to make a pipeline
                        "closes"   it has closed a pipeline
                        "fails"    its own error ends it; the words say which
                        "lost"     it ends because another rank is gone
                        "hangs"    all ranks end because they make no progress; the words say why
                        "listens"  the script looks at `should_stop`
                        "saves"    the checkpoint of a step is whole
supervisor ──▶ rank     b"stop"    end after the step that is running
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Literal, TypeAlias

import msgspec

_CONTROL = "ROTA_CONTROL"  # an environment variable: the socket's number and the supervisor's process id
_MOST_BYTES, _MOST_CHARACTERS = 65536, 4000
STOP = b"stop"
Event: TypeAlias = Literal["joins", "opens", "closes", "fails", "lost", "hangs", "listens", "saves"]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank reports; `words` of "fails" and "hangs", `step` and `training` of "saves"."""

    event: Event
    words: str = ""
    step: int = 0
    training: str = ""


# --- the supervisor's side --------------------------------------------------------------------------------------------


def make_pair() -> tuple[socket.socket, socket.socket]:
    """The supervisor's socket, and the rank's."""
    # Each packet is one message, so a rank that is killed while it sends leaves no half message.
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def environment_of(number: int, supervisor: int) -> dict[str, str]:
    """The environment through which a rank finds its socket, which has this number there, and its supervisor."""
    return {_CONTROL: f"{number} {supervisor}"}


def received(ours: socket.socket) -> tuple[list[Message], bool]:
    """The messages that have come, and whether more can come."""
    messages: list[Message] = []
    while True:
        try:
            data = ours.recv(_MOST_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return messages, True
        except OSError:
            data = b""
        if not data:
            return messages, False
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # whatever is no message
            messages.append(msgspec.json.decode(data, type=Message))


# --- the rank's side --------------------------------------------------------------------------------------------------


_connection: socket.socket | None = None
_process = 0  # whose connection it is: a forked one has the socket, too
_is_asked = False


def connect() -> int | None:
    """Connect to the supervisor, so that no child process can; returns the supervisor's process id.

    None if no supervisor started this process.
    """
    global _connection, _process, _is_asked
    if (line := os.environ.pop(_CONTROL, None)) is None:
        return None
    number, supervisor = map(int, line.split())
    os.set_inheritable(number, False)
    _connection, _process, _is_asked = socket.socket(fileno=number), os.getpid(), False
    return supervisor


def is_connected() -> bool:
    """Whether a supervisor has started this process, and shows what all ranks of this machine write."""
    return _connection is not None and _process == os.getpid()


def report(event: Event, words: str = "", step: int = 0, training: str = "") -> None:
    """Report to the supervisor, if there is one; only the first `_MOST_CHARACTERS` of the words."""
    if _connection is not None and is_connected():
        words = words[:_MOST_CHARACTERS].encode(errors="replace").decode()
        data = msgspec.json.encode(Message(event, words, step, training))
        with suppress(OSError):  # if the supervisor is gone, this rank is ended; if it is stopped, this must not block
            _connection.send(data, socket.MSG_DONTWAIT)


def stop_is_asked() -> bool:
    """Whether the supervisor has asked this rank to end after the step that is running."""
    global _is_asked
    if _connection is not None and is_connected() and not _is_asked:
        with suppress(OSError):
            _is_asked = _connection.recv(_MOST_BYTES, socket.MSG_DONTWAIT) == STOP
    return _is_asked and is_connected()
