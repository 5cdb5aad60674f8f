"""Search where transfers share links: 8 ranks x 32 micro-batches, a shared link busy for 30% of the time."""

from __future__ import annotations

import platform
from dataclasses import replace
from random import Random

from rota import Cluster, Costs, Link, Placement, find_plan, place, simulate
from rota.core.cluster import SharedLink
from rota.search import Progress

NUM_RANKS, NUM_MICROBATCHES, TIME_LIMIT_S = 8, 32, 10.0
FORWARD_US, INPUT_US, WEIGHT_US = 1000, 1000, 600
RATE, NUM_BYTES = 1000, 72_000  # of the host, in bytes per µs: a message of 72 µs, 14 of a micro-batch
EVERY = tuple(range(NUM_RANKS))


def own_links() -> Cluster:
    """No transfer waits for another one: for comparison."""
    return replace(one_host(), shared=())


def one_host() -> Cluster:
    """All messages through one host's memory."""
    link = Link(50, 4000)
    return Cluster((None,) * NUM_RANKS, link, shared=(SharedLink("host", RATE, EVERY, EVERY),))


def two_hosts() -> Cluster:
    """Two hosts of four ranks; the network card between them is as busy as the one host above."""
    a, b = EVERY[:4], EVERY[4:]
    hosts = [SharedLink(name, RATE, side, side) for name, side in (("host a", a), ("host b", b))]
    cards = [SharedLink(f"card {n}", RATE // 14, *ends) for n, ends in (("a to b", (a, b)), ("b to a", (b, a)))]
    link = Link(50, 4000)
    return Cluster((None,) * NUM_RANKS, link, shared=(*hosts, *cards))


def pipeline(cluster: Cluster, spread: float, memory: float | None) -> Placement:
    """A chain, F I W; stage times vary by `spread`. `memory` in what 1F1B's first rank holds."""
    chooser = Random(0)
    factors = [chooser.uniform(1 - spread, 1 + spread) for _ in range(NUM_RANKS)]
    columns = [[round(us * factor) for factor in factors] for us in (FORWARD_US, INPUT_US, WEIGHT_US)]
    held = 20 * NUM_BYTES
    limit = None if memory is None else round(memory * NUM_RANKS * held)
    costs = Costs(*columns, activation_bytes=held, boundary_bytes=NUM_BYTES)
    return place(costs, replace(cluster, limit_bytes=(limit,) * NUM_RANKS))


def main() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}")
    find_plan(pipeline(one_host(), 0.0, 2.0), 8, time_limit_s=1)  # to load or make compiled code
    print(
        "links      stages     memory   link busy   makespan   at least    gap  gap after 1 s  best named      s   how"
    )
    for name, cluster in (("own links", own_links()), ("one host", one_host()), ("two hosts", two_hosts())):
        for stages, spread in (("even", 0.0), ("uneven", 0.15)):
            for memory in (None, 1.0, 1.5):
                run(f"{name:<11}{stages:<11}{memory or 'any':>6}", pipeline(cluster, spread, memory))


def run(case: str, placement: Placement) -> None:
    gaps = [1.0]

    def progress(now: Progress) -> None:
        if now.elapsed_s <= 1:
            gaps.append(now.gap)

    result = find_plan(placement, NUM_MICROBATCHES, time_limit_s=TIME_LIMIT_S, progress=progress)
    assert simulate(result.plan).makespan_us == result.value_us
    links = range(len(placement.cluster.shared))
    services = [sum(route.service_us for route in placement.routes if i in route.shared) for i in links]
    busy = max(services, default=0) * NUM_MICROBATCHES / result.makespan_us
    named = min(named.makespan_us for named in result.named if named.fits)
    print(
        f"{case}{busy:>12.1%}{result.makespan_us:>11,}{int(result.bound_us):>11,}{result.gap:>8.2%}{gaps[-1]:>15.2%}"
        f"{named:>13,}{result.elapsed_s:>7.1f}   {result.how}",
        flush=True,
    )


if __name__ == "__main__":
    main()
