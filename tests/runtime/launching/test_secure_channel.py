"""The channel between the supervisors of two nodes: whoever lacks the secret, or changes what is sent, gets nowhere."""

from __future__ import annotations

import hmac
import json
import os
import random
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rota import PipelineError
from rota.runtime.launching import secure_channel
from rota.runtime.launching.secure_channel import (
    MOST_BYTES,
    Channel,
    ChannelError,
    RefusedError,
    greet_follower,
    greet_leader,
)
from rota.runtime.launching.shared_secret import VARIABLE, given_secret

SECRET, OTHER = b"0123456789abcdef" * 2, b"fedcba9876543210" * 2
SESSION = b"s" * 32


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    one.settimeout(60)
    other.settimeout(60)
    return one, other


def beside(act: Callable[[], Any]) -> Callable[[], Any]:
    """Call it on a thread; the result waits, and returns what it returned, or the error that it raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join()
        return found[0]

    return result


def greeted(of_leader: bytes = SECRET, of_follower: bytes = SECRET) -> tuple[Any, Any]:
    """What the leader and the follower make of each other: a channel or an error."""
    one, other = pair()
    leader = beside(lambda: greet_follower(one, of_leader))
    follower = beside(lambda: greet_leader(other, of_follower))
    found = leader(), follower()
    for each in (one, other):
        if any(isinstance(side, Exception) for side in found):
            each.close()
    return found


def values(channel: Channel, number: int) -> list[Any]:
    """The next messages."""
    found: list[Any] = []
    while len(found) < number:
        messages, has_come = channel.receive(60)
        assert has_come
        found += [message.value for message in messages]
    return found


def test_messages_go_both_ways() -> None:
    leader, follower = greeted()
    large = {"kind": "x", "text": "ä\n" * 300_000}
    sending = beside(lambda: [follower.send(each) for each in ({"kind": "a"}, large, {"kind": "b"})])
    assert values(leader, 3) == [{"kind": "a"}, large, {"kind": "b"}]
    sending()
    leader.send({"kind": "c"})
    assert values(follower, 1) == [{"kind": "c"}]
    assert follower.receive(0) == ([], False)
    leader.close()
    with pytest.raises(ChannelError, match="was closed"):
        follower.receive(60)
    follower.close()


def test_both_sides_say_that_the_secrets_differ() -> None:
    leader, follower = greeted(of_follower=OTHER)
    assert isinstance(leader, RefusedError)
    assert str(leader) == "the secrets differ; give all nodes the same"
    assert isinstance(follower, RefusedError)
    assert str(follower) == f"it refuses this node: {leader}"


def test_a_leader_without_the_secret_is_refused() -> None:
    """It cannot know it, even if it answers as if it had accepted."""
    one, other = pair()
    follower = beside(lambda: greet_leader(other, SECRET))
    receive(one)
    send(one, {"protocol": "rota nodes", "version": secure_channel.VERSION, "nonce": "0" * 64})
    proof = receive(one)["proof"]
    send(one, {"proof": proof})  # that of the follower, sent back
    assert isinstance(follower(), RefusedError)
    one.close()
    other.close()


def test_both_sides_say_that_the_versions_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair()
    leader = beside(lambda: greet_follower(one, SECRET))
    send(other, {"protocol": "rota nodes", "version": 0, "nonce": "0" * 64})
    told = "one node speaks version 0 of the protocol, the other version 1; install the same Rota on both"
    assert receive(other) == {"refused": told}
    assert str(leader()) == told
    one.close()
    other.close()


def test_what_was_recorded_of_one_connection_is_no_use_for_another() -> None:
    """A follower's messages, sent again by someone who does not have the secret."""
    one, other = pair()
    leader = beside(lambda: greet_follower(one, SECRET))
    hello = {"protocol": "rota nodes", "version": secure_channel.VERSION, "nonce": "ab" * 32}
    send(other, hello)
    nonces = bytes.fromhex("ab" * 32 + receive(other)["nonce"])
    proof = {"proof": hmac.digest(SECRET, b"follower" + nonces, "sha256").hex()}
    send(other, proof)
    assert "proof" in receive(other)
    leader().close()
    one, another = pair()
    leader = beside(lambda: greet_follower(one, SECRET))
    for message in (hello, proof):
        send(another, message)
    assert str(leader()) == "the secrets differ; give all nodes the same"
    for each in (one, other, another):
        each.close()


def send(to: socket.socket, message: object) -> None:
    data = json.dumps(message).encode()
    to.sendall(struct.pack(">I", len(data)) + data)


def receive(of: socket.socket) -> Any:
    with of.makefile("rb") as file:
        (length,) = struct.unpack(">I", file.read(4))
        return json.loads(file.read(length))


def sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


HELLO = {"protocol": "rota nodes", "version": 1, "nonce": "0" * 64}
GARBAGE = [
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\n\r\n",
    sized(b""),
    sized(b"\xff\xfe"),
    sized(b"[" * 4000),
    sized(b"[]"),
    sized(b"null"),
    sized(b'{"a": 1, "a": 2}'),
    sized(b'{"protocol": NaN}'),
    sized(b"9" * 4096),
    struct.pack(">I", 4097) + b"x" * 5000,
    b"\xff" * 100,
    sized(json.dumps({}).encode()),
    sized(json.dumps(HELLO | {"protocol": 3}).encode()),
    sized(json.dumps(HELLO | {"version": [[]]}).encode()),
    sized(json.dumps(HELLO | {"version": "\ud800"}).encode()),
    *(
        sized(json.dumps(HELLO | {"nonce": nonce}).encode())
        for nonce in (None, 3, "", "0" * 63, "x" * 64, [], "é" * 64)
    ),
    sized(json.dumps(HELLO).encode())[:-1],
    sized(json.dumps(HELLO).encode()) + sized(b"{}"),
    sized(json.dumps(HELLO).encode()) + sized(b'{"proof": 7}'),
    sized(json.dumps(HELLO).encode()) + sized(json.dumps({"proof": "0" * 64}).encode()),
    sized(json.dumps({"refused": "\x1b[2Jgone" * 1000}).encode()),
    sized(json.dumps({"refused": None}).encode()),
]


@pytest.mark.parametrize("greet", [greet_follower, greet_leader])
def test_garbage_is_refused(greet: Callable[[socket.socket, bytes], Channel]) -> None:
    random_bytes = [random.Random(seed).randbytes(seed * 7) for seed in range(1, 60)]
    for garbage in (*GARBAGE, *random_bytes):
        one, other = pair()
        found = beside(lambda one=one: greet(one, SECRET))  # type: ignore[misc]
        other.sendall(garbage)
        other.shutdown(socket.SHUT_WR)
        error = found()
        assert isinstance(error, ChannelError), garbage
        assert str(error).isprintable()
        assert len(str(error)) < 1100
        one.close()
        other.close()


def test_a_stranger_who_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_channel, "HANDSHAKE_S", 0.05)
    one, other = pair()
    with pytest.raises(ChannelError, match="it does not answer"):
        greet_follower(one, SECRET)
    one.close()
    other.close()


# --- messages ---------------------------------------------------------------------------------------------------------


def sent(*messages: object, is_leader: bool = False, session: bytes = SESSION) -> list[bytes]:
    """The bytes of each message."""
    one, other = pair()
    channel = Channel(one, session, is_leader)
    pieces = []
    try:
        for message in messages:
            channel.send(message)  # type: ignore[arg-type]
            pieces.append(other.recv(100_000))
    finally:
        one.close()
        other.close()
    return pieces


def taken(data: bytes) -> list[Any] | str:
    """What a leader takes of bytes from a follower: the messages, or its error."""
    one, other = pair()
    channel = Channel(one, SESSION, is_leader=True)
    other.sendall(data)
    other.shutdown(socket.SHUT_WR)
    found: list[Any] = []
    try:
        while True:
            found += [message.value for message in channel.receive(60)[0]]
    except ChannelError as error:
        return found if "was closed" in str(error) else str(error)
    finally:
        one.close()
        other.close()


A, B, C = {"kind": "a"}, {"kind": "b"}, {"kind": "c"}


def test_only_the_other_sides_next_message_is_taken() -> None:
    a, b, c = sent(A, B, C)
    assert taken(a + b + c) == [A, B, C]
    changed = "a message was changed on the way, left out, or sent again"
    assert taken(a + a) == changed
    assert taken(b) == changed
    assert taken(a + c) == changed
    assert taken(b + a) == changed
    assert taken(sent(A, is_leader=True)[0]) == changed  # its own, sent back
    assert taken(sent(A, session=b"t" * 32)[0]) == changed
    assert taken(struct.pack(">I", MOST_BYTES + 1) + a[4:]).startswith("it sent a message of")  # type: ignore[union-attr]


def test_every_changed_bit_is_noticed() -> None:
    """Or leads to a message that never comes to its end."""
    a, b = sent(A, B)
    for bit in range(8 * len(a)):
        data = bytearray(a)
        data[bit // 8] ^= 1 << bit % 8
        assert taken(bytes(data) + b) in ([], "a message was changed on the way, left out, or sent again") or bit < 32


def test_half_a_message_is_none() -> None:
    a, b = sent(A, B)
    for length in range(len(b)):
        assert taken(a + b[:length]) == [A]


def test_what_is_no_message_is_refused_even_with_the_right_key() -> None:
    key = hmac.digest(SESSION, b"to the leader", "sha256")
    for data in (b"", b"[]", b"\xff", b'{"a": 1, "a": 1}'):
        mac = hmac.digest(key, struct.pack(">Q", 0) + data, "sha256")
        assert taken(struct.pack(">I", len(data)) + mac + data) == "it does not speak Rota's protocol"


def test_the_last_words_are_read_although_the_other_side_still_talks() -> None:
    leader, follower = greeted()
    follower.send({"kind": "alive"})  # which the leader has not read when it ends the connection
    leader.send({"kind": "over"})
    closed = beside(lambda: leader.close_once_read(60))
    assert values(follower, 1) == [{"kind": "over"}]
    with pytest.raises(ChannelError, match="its connection was closed"):
        follower.receive(60)
    follower.send({"kind": "alive"})  # the leader still reads
    follower.close()
    assert closed() is None


def test_a_message_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_channel, "MOST_BYTES", 100)
    with pytest.raises(ChannelError, match="a message of 121 bytes is too large; 100 are allowed"):
        sent({"kind": "x" * 109})


# --- the secret -------------------------------------------------------------------------------------------------------


def secret_in(folder: Path, data: bytes, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_a_secret_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, OTHER.decode())
    assert given_secret(secret_in(tmp_path, SECRET + b"\n", 0o400)) == SECRET
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, OTHER.decode())
    assert given_secret(None) == OTHER
    assert VARIABLE not in os.environ
    with pytest.raises(PipelineError, match="several nodes need a secret; make one by"):
        given_secret(None)


@pytest.mark.parametrize(
    ("data", "mode", "told"),
    [
        (b"short\n", 0o600, "has 5 bytes; give 32 to 4096: make one by"),
        (b"", 0o600, "has 0 bytes; give 32"),
        (b"x" * 5000, 0o600, "has 4097 bytes or more; give 32"),
        (SECRET, 0o640, "others may read or write the secret"),
        (SECRET, 0o602, "others may read or write the secret"),
    ],
)
def test_a_bad_secret_is_refused(tmp_path: Path, data: bytes, mode: int, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        given_secret(secret_in(tmp_path, data, mode))


def test_a_secret_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"cannot read the secret .*: No such file"):
        given_secret(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(PipelineError, match=r"is not a regular file"):
        given_secret(tmp_path / "pipe")
    with pytest.raises(PipelineError, match=r"is not a regular file|Is a directory"):
        given_secret(tmp_path)
