"""Links that ranks share: the transfers of a step on them, their orders of service, and what others take from them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from rota.core import reading
from rota.core.errors import FormatError, PlanError
from rota.core.placement import Placement
from rota.core.tasks import Amount, Transfer, parse_ops

Orders = tuple[tuple[Transfer, ...], ...]  #: for each shared link of the cluster its transfers, first to last


class Contention:
    """How many of `num_places` are in use over time: cores by busy ranks, a link by transfers. All get fair shares.

    `times_us`: (start, end) of each use.
    """

    def __init__(self, times_us: Iterable[tuple[int, int]], num_places: int) -> None:
        self.num_places = num_places
        changes = [change for start, end in times_us for change in ((start, 1), (max(start, end), -1))]
        self._times, self._busy, self._lost = [0], [0], [0.0]  # _lost: cumulative, of an op that runs from 0
        for time, change in sorted(changes):
            share = max(0.0, 1 - num_places / self._busy[-1]) if self._busy[-1] else 0.0
            self._lost.append(self._lost[-1] + share * (time - self._times[-1]))
            self._times.append(time)
            self._busy.append(self._busy[-1] + change)

    def lost_us(self, start_us: int, end_us: int) -> int:
        """Time that a use of this interval lost, if all uses share the places fairly."""
        return int(self._lost_until(end_us) - self._lost_until(start_us))

    def _lost_until(self, time_us: int) -> float:
        i = bisect_right(self._times, time_us) - 1
        share = max(0.0, 1 - self.num_places / self._busy[i]) if self._busy[i] else 0.0
        return self._lost[i] + share * (time_us - self._times[i])

    def full_intervals(self, start_us: int, end_us: int) -> Iterator[tuple[int, int]]:
        """The parts of an idle interval in which others use all places."""
        first, last = bisect_right(self._times, start_us) - 1, bisect_right(self._times, end_us)
        inner = [time for time in self._times[first + 1 : last] if start_us < time < end_us]
        for a, b in pairwise([start_us, *inner, end_us]):
            if a < b and self._busy[bisect_right(self._times, a) - 1] >= self.num_places:
                yield a, b


class SharedTransfers:
    """The transfers of a step on shared links. Each is a node of the plan's graph, route after route.

    Args:
        placement: The placement.
        num_microbatches: Micro-batches of the step.
        following: The first node that is free for them.
    """

    def __init__(self, placement: Placement, num_microbatches: int, following: int) -> None:
        self._placement, self._num_microbatches, self._following = placement, num_microbatches, following

    @cached_property
    def first(self) -> Mapping[int, int]:
        """The first node of the transfers on each route that uses shared links."""
        following, first = self._following, {}
        for r, route in enumerate(self._placement.routes):
            if route.shared:
                first[r] = following
                following += len(self._placement.microbatches_on(r, self._num_microbatches))
        return first

    def transfers(self) -> Iterator[tuple[int, Transfer]]:
        """All transfers on shared links, with their nodes."""
        for r, first in self.first.items():
            for k, m in enumerate(self._placement.microbatches_on(r, self._num_microbatches)):
                yield first + k, self._placement.transfer(r, m)

    @cached_property
    def of_links(self) -> list[list[int]]:
        """For each shared link the nodes of its transfers, in ascending order."""
        nodes: list[list[int]] = [[] for _ in self._placement.cluster.shared]
        for r, first in self.first.items():
            for i in self._placement.routes[r].shared:
                nodes[i] += range(first, first + len(self._placement.microbatches_on(r, self._num_microbatches)))
        return nodes

    def nodes_of(self, orders: Orders) -> tuple[tuple[int, ...], ...]:
        """The orders as nodes. Raises PlanError unless each link serves exactly the transfers that use it."""
        if len(orders) != len(self.of_links):
            raise PlanError(
                f"the plan has {len(orders)} service orders for {len(self.of_links)} shared links; give one "
                f"per shared link, or none",
                "unknown",
            )
        orders_as_nodes = []
        for link, order, expected in zip(self._placement.cluster.shared, orders, self.of_links, strict=True):
            nodes = self._nodes(order)
            if sorted(nodes) != expected:
                raise self._misserved(link.name, order, nodes, {*expected})
            orders_as_nodes.append(tuple(nodes))
        return tuple(orders_as_nodes)

    def _nodes(self, order: Sequence[Transfer]) -> list[int]:
        """The node of each transfer; -1 where there is none. Of equal transfers, the first is on the first route."""
        nodes: list[int] = []
        times: Counter[Transfer] = Counter()
        for transfer in order:
            candidates = self._nodes_by_transfer.get(transfer, [-1])
            nodes.append(candidates[min(times[transfer], len(candidates) - 1)])
            times[transfer] += 1
        return nodes

    @cached_property
    def _nodes_by_transfer(self) -> Mapping[Transfer, list[int]]:
        nodes: dict[Transfer, list[int]] = {}
        for node, transfer in self.transfers():
            nodes.setdefault(transfer, []).append(node)
        return nodes

    def _misserved(self, link: str, order: Sequence[Transfer], nodes: list[int], expected: set[int]) -> PlanError:
        missing = set(expected)
        for transfer, node in zip(order, nodes, strict=True):
            if node not in expected:
                return PlanError(f"{link} serves {transfer}, a transfer that does not use it; remove it", "unknown")
            if node not in missing:
                return PlanError(f"{link} serves {transfer} twice; remove one of them", "duplicate")
            missing.remove(node)
        transfer = next(transfer for node, transfer in self.transfers() if node in missing)
        return PlanError(f"{link} never serves {transfer}; add it there", "missing")

    def starts_us(
        self, sent_us: Sequence[Sequence[int]], arrived_us: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...], ...]:
        """When links began to serve each transfer, from when it was sent and when it arrived.

        A transfer waits while its links serve those that they finish before it, or, if they divide their rate, for as
        long as it lost to others. A wait is never longer than what the transfer took beyond its planned time. Transfers
        that share no link begin when they are sent, and so do those of a simulated timeline: its times contain no wait.

        Args:
            sent_us: When each transfer was sent, by route and position, as in a `Timeline`.
            arrived_us: When it arrived.

        Returns:
            The starts, by route and position.
        """
        starts_us = [[*column] for column in sent_us]
        routes, value = self._placement.routes, self._placement.value
        spans: list[list[tuple[int, int]]] = [[] for _ in self._placement.cluster.shared]
        served = []  # by the end of service; after it, the latency is left
        for r in self.first:
            times = zip(
                self._placement.microbatches_on(r, self._num_microbatches), sent_us[r], arrived_us[r], strict=True
            )
            for k, (m, sent, arrived) in enumerate(times):
                duration_us, service_us = value(routes[r].duration_us, m), value(routes[r].service_us, m)
                served.append((arrived - duration_us + service_us, r, k, arrived - duration_us, service_us))
                for i in routes[r].shared:
                    spans[i].append((sent, arrived))
        links = [Contention(uses, 1) for uses in spans]
        free_us = [0] * len(links)
        for _, r, k, latest_us, service_us in sorted(served):
            sent, arrived, shared = sent_us[r][k], arrived_us[r][k], routes[r].shared
            in_turn_us = max(sent, min(latest_us, max(free_us[i] for i in shared)))
            lost_us = max(links[i].lost_us(sent, arrived) for i in shared)
            starts_us[r][k] = max(in_turn_us, min(latest_us, sent + lost_us))
            for i in shared:
                free_us[i] = min(in_turn_us + service_us, arrived)
        return tuple(map(tuple, starts_us))


# --- in a plan's file -------------------------------------------------------------------------------------------------


def to_texts(placement: Placement, orders: Orders) -> list[str]:
    """Service orders as rows of "2F0>3F0@3": an op, its reader, and the rank that receives."""
    ends: dict[tuple[int, ...], list[tuple[Amount, str]]] = {}
    for route, text in zip(placement.routes, _route_texts(placement), strict=True):
        ends.setdefault(route[:4], []).append((route.num_bytes, text))
    index, value = placement.index, placement.value

    def text_of(t: Transfer) -> str:
        routes = ends[index[t.source[:2]], index[t.target[:2]], t.sender, t.receiver]
        end = next(text for size, text in routes if value(size, t.source.microbatch) == t.num_bytes)
        return f"{t.source}>{t.target}{end}"

    return [" ".join(map(text_of, order)) for order in orders]


def read(placement: Placement, num_microbatches: int, row: str, path: str) -> tuple[Transfer, ...]:
    """A row of what `to_texts` writes. Raises FormatError."""
    tasks, transfers = placement.tasks, list[Transfer]()
    routes = {
        (str(tasks[route.source]), str(tasks[route.target]), text): r
        for r, (route, text) in enumerate(zip(placement.routes, _route_texts(placement), strict=True))
    }
    for text in row.split():
        ops, at, receiver = text.partition("@")
        pair = parse_ops(ops.split(">"), path)
        names = [f"{op.stage}{op.kind}" for op in pair]
        route = routes.get((names[0], names[1], at + receiver)) if len(pair) == 2 else None
        batches = range(0) if route is None else placement.microbatches_on(route, num_microbatches)
        if route is None or pair[0].microbatch != pair[1].microbatch or pair[0].microbatch not in batches:
            expected = "the plan has none"
            if routes:
                (a, b, to), first = next(iter(routes.items()))
                m = next(iter(placement.microbatches_on(first, num_microbatches)), 0)
                expected = f"expected one such as {a}{m}>{b}{m}{to}"
            raise FormatError(f"{path}: {reading.short(text)} is not a transfer; {expected}")
        transfers.append(placement.transfer(route, pair[0].microbatch))
    return tuple(transfers)


def _route_texts(placement: Placement) -> list[str]:
    """What tells routes between two tasks apart: the receiver, "@3"; of parallel ones also a number, "@3#1"."""
    counts: Counter[tuple[int, int, int]] = Counter()
    texts = []
    for source, target, _, receiver, *_ in placement.routes:
        number = counts[source, target, receiver]
        counts[source, target, receiver] += 1
        texts.append(f"@{receiver}#{number}" if number else f"@{receiver}")
    return texts
