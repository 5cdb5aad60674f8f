"""Put the clocks of several ranks on one: moved just so far that no message arrives before it was sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rota.core.errors import FormatError
from rota.core.tasks import Op


class Early(NamedTuple):
    """By how much a message was read before it was made, by the clocks of its two ranks; negative: after."""

    by_ns: int
    source: Op
    target: Op


def shifts_ns(earliest: Mapping[tuple[int, int], Early], num_ranks: int) -> list[int]:
    """How far each rank's clock must be moved ahead; 0 for all where the clocks agree with the messages.

    `earliest[sender, receiver]` is the message that was read the longest time before it was made: the receiver's clock
    is at least that much behind the sender's. Ranks of one machine share a clock, and clocks that a time server sets
    differ by little, so times that contradict no message are left as recorded. Raises FormatError if no shifts are
    enough: the traces are not of one run.
    """
    shifts = [0] * num_ranks
    senders: dict[int, int] = {}  # of each receiver, the one by whose messages it was moved last
    last = 0
    for _ in range(num_ranks):
        moved = False
        for (sender, receiver), early in earliest.items():
            if shifts[sender] + early.by_ns > shifts[receiver]:
                shifts[receiver], senders[receiver] = shifts[sender] + early.by_ns, sender
                last, moved = receiver, True
        if not moved:
            return shifts
    circle = _circle(senders, last)
    told = " and ".join(_told(earliest[pair], *pair) for pair in circle)
    total_ns = sum(earliest[pair].by_ns for pair in circle)
    raise FormatError(
        f"the traces contradict each other: {told}. No shift of the clocks explains this: {total_ns / 1000:,.0f} µs "
        f"remain, whatever the clocks; give traces of one run, all of the same steps"
    )


def _circle(senders: Mapping[int, int], rank: int) -> list[tuple[int, int]]:
    """The pairs of ranks, each (sender, receiver), whose messages move each other's clocks without an end.

    `rank` was moved after as many rounds as there are ranks, so the way back along `senders` enters a circle.
    """
    for _ in range(len(senders)):
        rank = senders[rank]
    circle = [(senders[rank], rank)]
    while circle[-1][0] != rank:
        circle.append((senders[circle[-1][0]], circle[-1][0]))
    return circle[::-1]


def _told(early: Early, sender: int, receiver: int) -> str:
    relation = "before" if early.by_ns > 0 else "after"
    return (
        f"rank {receiver} begins {early.target} {abs(early.by_ns) / 1000:,.0f} µs {relation} rank {sender} has made "
        f"its input in {early.source}"
    )
