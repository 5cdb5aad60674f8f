"""Which effects of wires a plan counts, in one line: without those that are not measured, it is too fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rota.figures import values_of
from rota.placement import Placement
from rota.units import count_text, size_text, time_text


def wire_effects(placement: Placement) -> str:
    """A line for reports; "" if the placement sends nothing."""
    if not placement.routes:
        return ""
    counted, missing = [*_counted(placement)], [*_not_counted(placement)]
    if not counted:
        return f"Transfers are counted as free. Not included in the times: {', '.join(missing)}."
    return f"Included in the times: {', '.join(counted)}." + (
        f" Not included: {', '.join(missing)}." if missing else ""
    )


def _links(placement: Placement) -> list[tuple[int, int | None]]:
    """Latency and rate of the links that are used."""
    pairs = {(route.sender, route.receiver) for route in placement.routes}
    links = [placement.cluster.link_between(*pair) for pair in pairs]
    return [(link.latency_us, link.bytes_per_us) for link in links]


def _message_costs_us(placement: Placement) -> tuple[int, int]:
    """The most that a message costs its sender, and its receiver."""
    links = [
        (placement.cluster.link_between(r.sender, r.receiver), max(values_of(r.num_bytes))) for r in placement.routes
    ]
    return (
        max(link.send_cost_us(num_bytes) for link, num_bytes in links),
        max(link.receive_cost_us(num_bytes) for link, num_bytes in links),
    )


def _counted(placement: Placement) -> Iterator[str]:
    latencies = [latency for latency, _ in _links(placement)]
    if any(latencies):
        yield f"latency ({_range(min(latencies), max(latencies), time_text)})"
    rates = [rate * 1_000_000 for _, rate in _links(placement) if rate is not None]
    if rates:
        yield f"rate ({_range(min(rates), max(rates), lambda rate: f'{size_text(rate)}/s')})"
    for i in sorted({i for route in placement.routes for i in route.shared}):
        shared = placement.cluster.shared[i]
        ranks = count_text(len({*shared.senders, *shared.receivers}), "rank")
        yield f"{shared.name} ({ranks} share {size_text(shared.bytes_per_us * 1_000_000)}/s)"
    sending, receiving = _message_costs_us(placement)
    if sending or receiving:
        yield f"messages (up to {time_text(sending)} at the sender and {time_text(receiving)} at the receiver)"
    if placement.cluster.gap_us:
        yield f"gaps between ops ({time_text(placement.cluster.gap_us)})"


def _not_counted(placement: Placement) -> Iterator[str]:
    links = _links(placement)
    if not any(latency for latency, _ in links):
        yield "latency"
    if all(rate is None for _, rate in links):
        yield "rate"
    if not any(route.shared for route in placement.routes):
        yield "links that ranks share"
    if not any(_message_costs_us(placement)):
        yield "the time that ranks spend on messages"
    if not placement.cluster.gap_us:
        yield "gaps between ops"


def _range(least: int, most: int, text: Callable[[int], str]) -> str:
    return text(least) if least == most else f"{text(least)} to {text(most)}"
