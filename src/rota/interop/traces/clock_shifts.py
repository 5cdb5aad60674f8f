"""Put the clocks of several ranks on one: moved just so far that no message arrives before it was sent."""

from __future__ import annotations

from collections.abc import Mapping

from rota.errors import FormatError


def shifts_ns(at_least_ns: Mapping[tuple[int, int], int], num_ranks: int) -> list[int]:
    """How far each rank's clock must be moved ahead; 0 for all where the clocks agree with the messages.

    `at_least_ns[sender, receiver]` is the longest time by which a message was read before it was made (negative:
    after), so at least as much as the receiver's clock is behind the sender's. Ranks of one machine share a clock, and
    clocks that a time server sets differ by little, so times that contradict no message are left as recorded. Raises
    FormatError if no shifts are enough: the traces are not of one run.
    """
    shifts = [0] * num_ranks
    for _ in range(num_ranks):
        moved = False
        for (sender, receiver), least in at_least_ns.items():
            if shifts[sender] + least > shifts[receiver]:
                shifts[receiver], moved = shifts[sender] + least, True
        if not moved:
            return shifts
    (sender, receiver), least = max(at_least_ns.items(), key=lambda entry: entry[1])
    raise FormatError(
        f"the traces contradict each other: rank {receiver} reads a message of rank {sender} {least / 1000:,.0f} µs "
        f"before it is made, and no shift of the clocks explains that; give traces of one run, all of the same steps"
    )
