"""Lines through measured times of messages, how far these are apart, and the links that follow from them.

    a message alone    send cost ── latency ── bytes / rate ── receive cost      all of it is what was measured
    µs                 a = send + latency + receive, per byte b = 1/send rate + 1/rate + 1/receive rate

A sender that copies a message into the wire is occupied while the message travels. So what it costs the two ranks is
part of the measured time, and only the rest of it is the link's: the sum of all three is what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple

from rota.cluster import Link

_FASTEST_BYTES_PER_US = 1_000_000  # 1 TB/s: a wire this fast counts as one without limit
_LEAST_PART = 0.02  # of a message's time per byte: less than that is left to the link only by chance


class Sample(NamedTuple):
    """Repeated measurements of messages of one size.

    `us`: their median, which may be negative where it is a difference of two times. `spread_us`: the interquartile
    range. `low_us`: the first quartile. Other load only makes messages slower, so the lower half is the steadier one.
    """

    num_bytes: int
    us: float
    spread_us: float
    low_us: float

    @property
    def spread(self) -> float:
        """The interquartile range as a part of the median."""
        return self.spread_us / abs(self.us) if self.us else float(self.spread_us > 0)


class Line(NamedTuple):
    """µs for a message of any size: `us` for each message and `us_per_byte` for each of its bytes."""

    us: float = 0.0
    us_per_byte: float = 0.0

    def at(self, num_bytes: int) -> float:
        """µs for a message of this size."""
        return self.us + self.us_per_byte * num_bytes

    @property
    def bytes_per_us(self) -> int | None:
        """The rate, as links have it: None where bytes take no time."""
        if self.us_per_byte * _FASTEST_BYTES_PER_US <= 1:
            return None
        return max(round(1 / self.us_per_byte), 1)


def sample_of(num_bytes: int, times_us: Sequence[float]) -> Sample:
    """What repeated measurements say."""
    if len(times_us) < 2:
        return Sample(num_bytes, times_us[0], 0.0, times_us[0])
    first, _, third = quantiles(times_us, n=4, method="inclusive")
    return Sample(num_bytes, median(times_us), third - first, first)


def line_through(points: Sequence[tuple[int, float]], least_us: float = 0.0) -> Line:
    """The line that is nearest to times by bytes: the least squares of the relative errors, neither part negative.

    Points on such a line are met exactly.

    Args:
        points: Bytes and µs; at least one.
        least_us: Errors count as a part of this where a time is shorter, as noise does not shrink with it. Times of 0
            need it.

    Returns:
        The line. Where time does not grow with bytes, all of it is per message; where the best line begins below 0,
        all of it is per byte.
    """
    weighted = [(num_bytes, us, 1 / max(us, least_us, 1e-9) ** 2) for num_bytes, us in points]
    weight = sum(w for *_, w in weighted)
    mean_bytes = sum(w * n for n, _, w in weighted) / weight
    mean_us = sum(w * us for _, us, w in weighted) / weight
    by_bytes = sum(w * (n - mean_bytes) ** 2 for n, _, w in weighted)
    by_both = sum(w * (n - mean_bytes) * (us - mean_us) for n, us, w in weighted)
    us_per_byte = by_both / by_bytes if by_bytes else 0.0
    if us_per_byte <= 0:
        return Line(max(mean_us, 0.0), 0.0)
    at_zero = mean_us - us_per_byte * mean_bytes
    if at_zero >= 0:
        return Line(at_zero, us_per_byte)
    squares = sum(w * n * n for n, _, w in weighted)
    return Line(0.0, max(sum(w * n * us for n, us, w in weighted) / squares, 0.0))


def link_of_lines(alone: Line, send: Line, receive: Line) -> Link:
    """The link of messages that take `alone` on a wire of their own, of which `send` and `receive` occupy the ranks."""
    latency_us = max(alone.us - send.us - receive.us, 0.0)
    per_byte = alone.us_per_byte - send.us_per_byte - receive.us_per_byte
    if per_byte < _LEAST_PART * alone.us_per_byte:
        per_byte = 0.0
    wire = Line(latency_us, per_byte)
    costs = (round(send.us), send.bytes_per_us, round(receive.us), receive.bytes_per_us)
    return Link(round(latency_us), wire.bytes_per_us, *costs)


def rate_of_rounds(rounds: Sequence[Sample], num_messages: int, num_sent: int, cost: Line) -> float:
    """The rate of what all messages of a round share, in bytes per µs.

    In a round every rank exchanges a message of one size with each neighbour, and waits for those that it gets. So a
    round lasts as long as the ranks are occupied, and then as long as all messages need one after another.

    Args:
        rounds: Time of a round by the size of its messages.
        num_messages: Messages of a round.
        num_sent: Messages that the rank with most neighbours sends, and gets as many.
        cost: What sending and receiving a message occupies a rank, together.

    Returns:
        The rate that makes up the measured rounds; at most ten times that of the rounds as a whole.
    """
    rates = []
    for num_bytes, us, *_ in rounds:
        served_us = max(us - num_sent * cost.at(num_bytes), us / 10)
        rates.append(num_messages * num_bytes / served_us)
    return median(rates)
