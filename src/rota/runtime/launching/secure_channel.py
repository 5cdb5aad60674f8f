"""An authenticated connection between the supervisors of two nodes, which share a secret.

    follower                                                leader
      │ ── version, nonce f ───────────────────────────────▶ │
      │ ◀─────────────────────────────── version, nonce l ── │
      │ ── HMAC(secret, "follower", f, l) ─────────────────▶ │  knows that the follower has the secret
      │ ◀───────────────── HMAC(secret, "leader", f, l) ──── │  now the follower knows it of the leader
      │ ◀─────────── messages, each with its HMAC ─────────▶ │

Both nonces are new, so nothing that was sent on an earlier connection is of use. From secret and nonces come two keys,
one per direction. A message's HMAC covers its number, so a message that is changed, left out, repeated, moved or sent
back ends the connection. Messages are JSON objects and are not encrypted: anyone on the way can read them.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, final

from rota import reading
from rota.errors import FormatError, PipelineError
from rota.reading import Field

VERSION = 1
_PROTOCOL = "rota nodes"
_NONCE_BYTES = 32
_HASH = "sha256"
_MAC_BYTES = 32
_LENGTH, _NUMBER = struct.Struct(">I"), struct.Struct(">Q")
_MOST_GREETING_BYTES = 4096  # of one message before it is known who sends
MOST_BYTES = 64 * 1024**2  # of one message after that
_PIECE_BYTES = 1 << 16
_LONGEST_WORDS = 1000
_CLOSED = "its connection was closed"
HANDSHAKE_S = 10.0  # for all of it
SEND_S = 15.0  # until a message is sent; the other side does not read if it takes longer


class ChannelError(PipelineError):
    """The connection has ended, or what came was not sent by someone who has the secret."""


class RefusedError(ChannelError):
    """This side or the other one refuses the connection, and trying again does not help."""


@final
class Channel:
    """A connection after the handshake. Any thread may send, one receives."""

    def __init__(self, connection: socket.socket, session: bytes, is_leader: bool) -> None:
        connection.settimeout(SEND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keys = [_mac(session, b"to the leader"), _mac(session, b"to the follower")]
        self._to_send, self._to_receive = reversed(keys) if is_leader else keys
        self._connection = connection
        #: The address of this machine, by which the other one reaches it, and that of the other one.
        self.own_address, self.other_address = str(connection.getsockname()[0]), str(connection.getpeername()[0])
        self._sending = threading.Lock()
        self._num_sent = self._num_received = 0
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a JSON object. Raises ChannelError if it is too large, or the connection has ended or is stuck."""
        data = json.dumps(message).encode()
        if len(data) > MOST_BYTES:
            raise ChannelError(f"a message of {len(data):,} bytes is too large; {MOST_BYTES:,} are allowed")
        with self._sending:
            mac = _mac(self._to_send, _NUMBER.pack(self._num_sent) + data)
            self._num_sent += 1
            try:
                self._connection.sendall(_LENGTH.pack(len(data)) + mac + data)
            except OSError as error:
                raise ChannelError(_words_of(error)) from None

    def receive(self, wait_s: float) -> tuple[list[Field], bool]:
        """The messages that have come in full, and whether anything came within `wait_s`.

        Raises:
            ChannelError: the connection has ended, or a message is not the other side's next one.
        """
        if not self._poll.poll(wait_s * 1000):
            return [], False
        try:
            data = self._connection.recv(_PIECE_BYTES)
        except OSError as error:
            raise ChannelError(_words_of(error)) from None
        if not data:
            raise ChannelError(_CLOSED)
        self._buffer += data
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found, True

    def _next(self) -> Field | None:
        head = _LENGTH.size + _MAC_BYTES
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MOST_BYTES:
            raise ChannelError(f"it sent a message of {length:,} bytes; {MOST_BYTES:,} are allowed")
        if len(self._buffer) < head + length:
            return None
        mac, data = bytes(self._buffer[_LENGTH.size : head]), bytes(self._buffer[head : head + length])
        del self._buffer[: head + length]
        if not hmac.compare_digest(mac, _mac(self._to_receive, _NUMBER.pack(self._num_received) + data)):
            raise ChannelError("a message was changed on the way, left out, or sent again")
        self._num_received += 1
        return _parsed(data)

    def close_once_read(self, wait_s: float) -> None:
        """End the connection once the other side has; unread messages of its own would make it lose the last ones."""
        deadline_s = time.monotonic() + wait_s
        with suppress(OSError, ChannelError):
            self._connection.shutdown(socket.SHUT_WR)
            while (left_s := deadline_s - time.monotonic()) > 0:
                self.receive(left_s)
        self.close()

    def close(self) -> None:
        """End the connection, also for a thread that waits for a message."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


# --- the handshake ----------------------------------------------------------------------------------------------------


def greet_leader(connection: socket.socket, secret: bytes) -> Channel:
    """The follower's side of the handshake.

    Raises:
        RefusedError: the secrets or the versions differ.
        ChannelError: the other side does not answer, or speaks another language.
    """
    line = _Greeting(connection)
    mine = secrets.token_bytes(_NONCE_BYTES)
    line.send({"protocol": _PROTOCOL, "version": VERSION, "nonce": mine.hex()})
    nonces = mine + _nonce(line.receive())
    line.send({"proof": _mac(secret, b"follower" + nonces).hex()})
    if not _proves(line.receive(), _mac(secret, b"leader" + nonces)):
        raise RefusedError("the secrets differ; give all nodes the same")
    return Channel(connection, _mac(secret, b"session" + nonces), is_leader=False)


def greet_follower(connection: socket.socket, secret: bytes) -> Channel:
    """The leader's side of the handshake; the other side is told why it is refused.

    Raises:
        ChannelError: the other side is refused, does not answer, or speaks another language.
    """
    line = _Greeting(connection)
    try:
        theirs = _nonce(line.receive())
        mine = secrets.token_bytes(_NONCE_BYTES)
        line.send({"protocol": _PROTOCOL, "version": VERSION, "nonce": mine.hex()})
        nonces = theirs + mine
        if not _proves(line.receive(), _mac(secret, b"follower" + nonces)):
            raise RefusedError("the secrets differ; give all nodes the same")
        line.send({"proof": _mac(secret, b"leader" + nonces).hex()})
    except ChannelError as error:
        with suppress(ChannelError):
            line.send({"refused": str(error)})
        raise
    return Channel(connection, _mac(secret, b"session" + nonces), is_leader=True)


@final
class _Greeting:
    """Messages before the other side is known: small, and all within `HANDSHAKE_S`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline_s = time.monotonic() + HANDSHAKE_S

    def send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode()
        self._limit()
        try:
            self._connection.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise ChannelError(_words_of(error)) from None

    def receive(self) -> Field:
        """Raises RefusedError if the other side refuses this one."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _MOST_GREETING_BYTES:
            raise ChannelError("it does not speak Rota's protocol")
        message = _parsed(self._exactly(length))
        if "refused" in message.value:
            # Anyone can send this. On node 0, it ends nothing but this connection. Another node believes it and ends:
            # whoever can answer there can keep the run from starting anyway, and a wrong secret shows at once.
            words = message["refused"].value
            shown = reading.printable(words[:_LONGEST_WORDS]) if isinstance(words, str) else "without a reason"
            raise RefusedError(f"it refuses this node: {shown}")
        return message

    def _exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            self._limit()
            try:
                piece = self._connection.recv(num_bytes - len(data))
            except OSError as error:
                raise ChannelError(_words_of(error)) from None
            if not piece:
                raise ChannelError(_CLOSED)
            data += piece
        return data

    def _limit(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise ChannelError("it does not answer")
        self._connection.settimeout(left_s)


def _nonce(message: Field) -> bytes:
    fields = message.value
    if fields.get("protocol") != _PROTOCOL:
        raise ChannelError("it does not speak Rota's protocol")
    if fields.get("version") != VERSION:
        version = reading.short(fields.get("version"))
        raise RefusedError(
            f"one node speaks version {version} of the protocol, the other version {VERSION}; install the same Rota on "
            f"both"
        )
    return _bytes_of(fields.get("nonce"), _NONCE_BYTES)


def _proves(message: Field, expected: bytes) -> bool:
    return hmac.compare_digest(_bytes_of(message.value.get("proof"), _MAC_BYTES), expected)


def _bytes_of(text: object, num_bytes: int) -> bytes:
    with suppress(ValueError):
        if isinstance(text, str) and len(text) == 2 * num_bytes:
            return bytes.fromhex(text)
    raise ChannelError("it does not speak Rota's protocol")


def _parsed(data: bytes) -> Field:
    try:
        message = Field("message", reading.load(data.decode()))
    except (FormatError, UnicodeDecodeError):
        raise ChannelError("it does not speak Rota's protocol") from None
    if not isinstance(message.value, dict):
        raise ChannelError("it does not speak Rota's protocol")
    return message


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, _HASH)


def _words_of(error: OSError) -> str:
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return _CLOSED  # by a process that has ended before it read everything
    return "it does not answer" if isinstance(error, TimeoutError) else f"its connection broke ({error.strerror})"
