"""Latency and rate of a link, from what transfers took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low

from rota.costs import Link


def fitted(by_size: Mapping[int, Sequence[int]], planned: Link) -> Link:
    """`by_size`: µs of transfers by their bytes. Their medians are met as closely as a link can.

    One size alone does not tell latency from rate: then the rate stays as planned, unless that would be too slow.
    """
    points = [(size, median_low(times), len(times)) for size, times in sorted(by_size.items()) if times]
    rates = [planned.bytes_per_us, *_rates(points), None]
    links = [_with_rate(rate, points) for rate in rates]
    return min(links, key=lambda link: sum(count * abs(us - link.transfer_us(size)) for size, us, count in points))


def _rates(points: Sequence[tuple[int, int, int]]) -> list[int]:
    """Bytes per µs: by least squares over the sizes, or as fast as the only one needs it."""
    total = sum(count for *_, count in points)
    mean_size = sum(size * count for size, _, count in points) / total
    mean_us = sum(us * count for _, us, count in points) / total
    spread = sum(count * (size - mean_size) ** 2 for size, _, count in points)
    if not spread:
        size, us, _ = points[0]
        return [-(-size // us)] if size and us else []
    per_byte = sum(count * (size - mean_size) * (us - mean_us) for size, us, count in points) / spread
    if per_byte <= 0 or per_byte < 1e-15:
        return []
    rate = 1 / per_byte
    return sorted({max(int(rate), 1), int(rate) + 1, max(round(rate), 1)})


def _with_rate(rate: int | None, points: Sequence[tuple[int, int, int]]) -> Link:
    """With the latency that meets most transfers."""
    beyond = [us - Link(0, rate).transfer_us(size) for size, us, count in points for _ in range(count)]
    return Link(max(median_low(beyond), 0), rate)
