"""Messages between processes on CPUs, by the path that a pipeline's take: `Transport`, and a new buffer for each one.

    pace     sender    compute ──▶ send                  the time from `send` until `take` returns is the message's
             receiver  post ─ take ‥‥‥‥‥▶│
    asleep   all ranks sleep, and send to a neighbour at fixed times, one after another
    rounds   all ranks post, send to each neighbour, take ─▶ post, send …      as long as the slowest rank

Times of two processes are compared by the clock of rank 0, see `rota.runtime.recorder.clock_offset_ns`. Between hosts
clocks agree no better than a message takes, so there each direction counts as half of both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from rota.profiling.sleeping import set_timer_slack_ns
from rota.programs.actions import Message, ValueKey
from rota.runtime.clocks import clock_offset_ns
from rota.runtime.messages import Format
from rota.runtime.transport import Transport
from rota.tasks import Kind, Op, Transfer

SIZES = (1, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # up to 16 MiB
ROUND_SIZES = (1 << 20, 1 << 22)
PACE_US = 2000  # as long as a short op
SLEEP_US = 10_000  # of every rank between two messages that it sends to neighbours, as a rehearsed op of middle length
_WARM_UP = 2  # messages: the first one makes the connection
_WARM_UP_ASLEEP = 4  # rounds: buffers and windows of connections grow with use
_CALM_BYTES_PER_US = 900  # messages of sleepers are so far apart that none of them meets another one
_FEW_BYTES = 1 << 22  # larger messages are sent half as often
_ROUND_BYTES = 1 << 23  # of each message's direction in a measurement of rounds


@final
class Wire:
    """This process's messages to and from the others of the default group. Making it is collective."""

    def __init__(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._transport = Transport(group, group)
        self._offset_ns = clock_offset_ns(group)

    def post(self, sender: int, num_bytes: int, number: int) -> ValueKey:
        """Start to receive a message, into a new buffer; `number` tells it from others that are under way."""
        message = _message(sender, self.rank, num_bytes, number)
        form = Format(("tensor", "uint8", (num_bytes,), False))
        form.gradients = form.tensors
        self._transport.formats[sender, False, number] = form
        self._transport.post(message, False)
        return message.value

    def take(self, key: ValueKey) -> torch.Tensor:
        """Wait for a message that was posted."""
        (tensor,) = self._transport.take(key)
        return tensor  # type: ignore[no-any-return]

    def send(self, receiver: int, tensor: torch.Tensor, number: int) -> None:
        """Send a message."""
        self._transport.send_gradients(_message(self.rank, receiver, tensor.numel(), number), [tensor])

    def drain(self) -> None:
        """Wait until all that was sent is through."""
        self._transport.drain()

    def now_ns(self) -> int:
        """The time by the clock of rank 0."""
        return time.monotonic_ns() + self._offset_ns

    def wait_for_all(self) -> None:
        """Wait until all ranks are here."""
        self.agreed_ns()

    def agreed_ns(self) -> int:
        """When the last rank has called this, by the clock of rank 0: the same on all. Collective."""
        latest = torch.tensor([self.now_ns()])
        self._transport.all_reduce(latest, dist.ReduceOp.MAX, "measuring links")
        return int(latest)

    def close(self) -> None:
        """End its thread."""
        self._transport.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _message(sender: int, receiver: int, num_bytes: int, number: int) -> Message:
    transfer = Transfer(Op(0, Kind.F, number), Op(1, Kind.F, number), sender, receiver, num_bytes)
    return Message(transfer, (sender, True, number), (sender, number))


# --- messages alone ---------------------------------------------------------------------------------------------------


def one_way(wire: Wire, sender: int, receiver: int, num_bytes: int, repeats: int) -> list[float]:
    """Times of single messages, in µs, on the receiver; the sender gets []. Both call it.

    Args:
        wire: This process's.
        sender: One process.
        receiver: The other.
        num_bytes: Size of a message.
        repeats: Number of messages.
    """
    times: list[float] = []
    for number in range(_WARM_UP + repeats):
        if wire.rank == sender:
            tensor = torch.full((num_bytes,), 1, dtype=torch.uint8)
            computed_ns = wire.now_ns() + 1000 * PACE_US
            while wire.now_ns() < computed_ns:
                pass
            begun_ns = wire.now_ns()
            wire.send(receiver, tensor, number)
            del tensor
            wire.take(wire.post(receiver, 1, number))  # the message is through: the wire is free again
            wire.send(receiver, torch.tensor([begun_ns]).view(torch.uint8), -1 - number)
        else:
            wire.take(wire.post(sender, num_bytes, number))
            arrived_ns = wire.now_ns()
            wire.send(sender, torch.zeros(1, dtype=torch.uint8), number)
            times.append((arrived_ns - _number_from(wire, sender, -1 - number)) / 1000)
    wire.drain()
    return times[_WARM_UP:]


def _echoes(wire: Wire, sender: int, receiver: int, repeats: int) -> list[float]:
    """Halves of round trips of small messages, one directly after another, in µs."""
    times, tensor = [], torch.zeros(1, dtype=torch.uint8)
    for number in range(_WARM_UP + repeats):
        begun_ns = time.perf_counter_ns()
        if wire.rank == receiver:
            wire.send(sender, tensor, number)
            wire.take(wire.post(sender, 1, number))
        else:
            wire.take(wire.post(receiver, 1, number))
            wire.send(receiver, tensor, number)
        times.append((time.perf_counter_ns() - begun_ns) / 2000)
    wire.drain()
    return times[_WARM_UP:]


def _number_from(wire: Wire, sender: int, number: int) -> int:
    return int(wire.take(wire.post(sender, 8, number)).view(torch.int64))


def samples_of_pair(wire: Wire, a: int, b: int, repeats: int) -> dict[str, Any]:
    """What this process has received of both directions, as JSON: by sender and receiver."""
    found: dict[str, Any] = {}
    for sender, receiver in ((a, b), (b, a)):
        by_kind: dict[str, list[list[float]]] = {"hot": [], "paced": []}
        for size in SIZES:
            by_kind["paced"].append([size, *one_way(wire, sender, receiver, size, _count(size, repeats))])
        by_kind["hot"].append([1, *_echoes(wire, sender, receiver, 3 * repeats)])
        if wire.rank == receiver:
            found[f"{sender} {receiver}"] = by_kind
    return found


def _count(size: int, repeats: int) -> int:
    return repeats if size <= _FEW_BYTES else max(repeats // 2, 2)


# --- from ranks that sleep --------------------------------------------------------------------------------------------


def messages_of_sleepers(wire: Wire, repeats: int) -> dict[str, Any]:
    """Times of messages between neighbours that sleep until fixed times, in µs. Collective.

    Every rank sends to both neighbours in turn, `SLEEP_US` apart or longer, and no two ranks at once. So ranks and
    cores have rested as long as in a rehearsal of ops of that length. A message's time begins at the end of the sleep
    as planned, not when the sender is awake.

    Returns:
        What this process has received, as `samples_of_pair` has it.
    """
    found: dict[str, Any] = {}
    set_timer_slack_ns(1)  # as in a rehearsal
    try:
        for size in SIZES:
            for (sender, receiver), times in _slept(wire, size, _count(size, repeats)).items():
                found.setdefault(f"{sender} {receiver}", {"asleep": []})["asleep"].append([size, *times])
    finally:
        set_timer_slack_ns(0)
    return found


def _slept(wire: Wire, size: int, repeats: int) -> dict[tuple[int, int], list[float]]:
    ranks = range(wire.num_ranks)
    senders = [*ranks[::2], *ranks[1::2]]  # a rank that has just received does not send next
    slots = [(a, a + step) for step in (1, -1) for a in senders if a + step in ranks]
    apart_us = max(2 * SLEEP_US / len(slots), size / _CALM_BYTES_PER_US)
    begin_ns = wire.agreed_ns() + round(1000 * SLEEP_US)
    found: dict[tuple[int, int], list[float]] = {pair: [] for pair in slots if pair[1] == wire.rank}
    for number in range(_WARM_UP_ASLEEP + repeats):
        keys = {sender: wire.post(sender, size, number) for sender, _ in found}
        for slot, (sender, receiver) in enumerate(slots):
            due_ns = begin_ns + round(1000 * apart_us * (number * len(slots) + slot))
            if wire.rank == sender:
                tensor = torch.empty(size, dtype=torch.uint8)
                time.sleep(max(due_ns - wire.now_ns(), 0) / 1e9)
                wire.send(receiver, tensor, number)
                del tensor
            elif wire.rank == receiver:
                wire.take(keys.pop(sender))
                found[sender, receiver].append((wire.now_ns() - due_ns) / 1000)
    wire.drain()
    return {pair: times[_WARM_UP_ASLEEP:] for pair, times in found.items()}


# --- all neighbours at once -------------------------------------------------------------------------------------------


def rounds(wire: Wire, neighbours: Sequence[int], repeats: int) -> list[list[float]]:
    """Times, in µs, of rounds in which this rank exchanges a message with each neighbour. Collective.

    Returns:
        For each of `ROUND_SIZES` one time per repeat: the mean of several rounds.
    """
    found = []
    for size in ROUND_SIZES:
        times, count = [], max(_ROUND_BYTES // size, 2)
        for _ in range(1 + repeats):
            values = [torch.full((size,), 1, dtype=torch.uint8) for _ in neighbours]
            wire.wait_for_all()
            begun_ns = wire.now_ns()
            for number in range(count):
                keys = [wire.post(peer, size, number) for peer in neighbours]
                for peer, value in zip(neighbours, values, strict=True):
                    wire.send(peer, value, number)
                for key in keys:
                    wire.take(key)
            wire.drain()
            times.append((wire.now_ns() - begun_ns) / 1000 / count)
        found.append(times[1:])
    return found
