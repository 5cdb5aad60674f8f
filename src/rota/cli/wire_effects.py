"""Which effects of wires a plan counts, in one line: without those that are not measured, it is too fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rota.core.cluster import Link
from rota.core.placement import Placement
from rota.core.units import count_text, size_text, time_text

_FREE = "Transfers are counted as free{}; give --link or --links when planning."
FREE = _FREE.format("")


def free_text(num_ranks: int, num_cores: int | None) -> str:
    """`FREE`, with the reason where ranks of a timeline shared cores: there, `rota autoplan` measures no links."""
    if num_cores is None or num_ranks <= num_cores:
        return FREE
    return _FREE.format(", because links are measured only with a core per rank")


def wire_effects(placement: Placement, free: str = FREE) -> str:
    """A line for reports, which says `free` if transfers are; "" if the placement sends nothing."""
    if not placement.routes:
        return ""
    counted, missing = [*_of_transfers(placement)], [*_not_counted(placement)]
    free_texts = [] if not free or counts_transfers(placement) else [free]
    counted_text = [f"Included in the times: {', '.join(counted)}."] if counted else []
    not_included = "Not included" if counted else "Not included in the times"
    return " ".join([*free_texts, *counted_text, *([f"{not_included}: {', '.join(missing)}."] if missing else [])])


def counts_transfers(placement: Placement) -> bool:
    """Whether a transfer of the placement takes time; False if it sends nothing."""
    return any(_of_transfers(placement))


def _links(placement: Placement) -> list[Link]:
    """The links that are used."""
    pairs = {(route.sender, route.receiver) for route in placement.routes}
    return [placement.cluster.link_between(*pair) for pair in pairs]


def _of_transfers(placement: Placement) -> Iterator[str]:
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


def _not_counted(placement: Placement) -> Iterator[str]:
    """What no figure counts."""
    links, is_shared = _links(placement), any(route.shared for route in placement.routes)
    if not any(link.latency_us for link in links):
        yield "latency"
    if not is_shared and all(link.bytes_per_us is None for link in links):
        yield "rate"
    if not is_shared:
        yield "links that ranks share"


def _range(least: int, most: int, text: Callable[[int], str]) -> str:
    return text(least) if least == most else f"{text(least)} to {text(most)}"
