"""What a plan counts of its transfers, in one line: without links that are given or measured, it is too fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rota.core.cluster import Link
from rota.core.placement import Placement
from rota.core.units import count_text, size_text, time_text

FREE = "Transfers are counted as free; give --link or --links when planning."


def transfers_text(placement: Placement) -> str:
    """A line for reports; "" if the placement sends nothing."""
    counted = ", ".join(_counted(placement))
    return f"Included in the times: {counted}." if counted else FREE if placement.routes else ""


def counts_transfers(placement: Placement) -> bool:
    """Whether a transfer of the placement takes time; False if it sends nothing."""
    return any(_counted(placement))


def _links(placement: Placement) -> list[Link]:
    """The links that are used."""
    pairs = {(route.sender, route.receiver) for route in placement.routes}
    return [placement.cluster.link_between(*pair) for pair in pairs]


def _counted(placement: Placement) -> Iterator[str]:
    latencies = [link.latency_us for link in _links(placement)]
    if any(latencies):
        yield f"latency ({_range(min(latencies), max(latencies), time_text)})"
    rates = [link.bytes_per_us * 1_000_000 for link in _links(placement) if link.bytes_per_us is not None]
    if rates:
        yield f"rate ({_range(min(rates), max(rates), lambda rate: f'{size_text(rate)}/s')})"
    for i in sorted({i for route in placement.routes for i in route.shared}):
        shared = placement.cluster.shared[i]
        ranks = count_text(len({*shared.senders, *shared.receivers}), "rank")
        yield f"{shared.name} ({ranks} share {size_text(shared.bytes_per_us * 1_000_000)}/s)"


def _range(least: int, most: int, text: Callable[[int], str]) -> str:
    return text(least) if least == most else f"{text(least)} to {text(most)}"
