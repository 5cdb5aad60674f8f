"""Service orders: the transfers that shared links serve, in which order, and how a plan's file writes that down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from rota.core import reading, schedule_csv
from rota.core.errors import FormatError, PlanError
from rota.core.placement import Placement
from rota.core.tasks import Transfer

Orders = tuple[tuple[Transfer, ...], ...]  #: for each shared link of the cluster its transfers, first to last


class Services:
    """The transfers of a step on shared links. Each is a node of the plan's graph, route after route.

    Args:
        placement: The placement.
        num_microbatches: Micro-batches of the step.
        following: The first node that is free for them.
    """

    def __init__(self, placement: Placement, num_microbatches: int, following: int) -> None:
        self._placement, self._num_microbatches, self._following = placement, num_microbatches, following

    def _microbatches_on(self, route: int) -> range:
        return microbatches_on(self._placement, self._num_microbatches, route)

    @cached_property
    def first(self) -> Mapping[int, int]:
        """The first node of the transfers on each route that uses shared links."""
        following, first = self._following, {}
        for r, route in enumerate(self._placement.routes):
            if route.shared:
                first[r] = following
                following += len(self._microbatches_on(r))
        return first

    def transfers(self) -> Iterator[tuple[int, Transfer]]:
        """All transfers on shared links, with their nodes."""
        for r, first in self.first.items():
            for k, m in enumerate(self._microbatches_on(r)):
                yield first + k, self._placement.transfer(r, m)

    @cached_property
    def of_links(self) -> list[list[int]]:
        """For each shared link the nodes of its transfers, in ascending order."""
        nodes: list[list[int]] = [[] for _ in self._placement.cluster.shared]
        for r, first in self.first.items():
            for i in self._placement.routes[r].shared:
                nodes[i] += range(first, first + len(self._microbatches_on(r)))
        return nodes

    def nodes_of(self, orders: Orders) -> tuple[tuple[int, ...], ...]:
        """The orders as nodes. Raises PlanError unless each link serves exactly the transfers that use it."""
        if len(orders) != len(self.of_links):
            raise PlanError(
                f"the plan has {len(orders)} service orders for {len(self.of_links)} shared links; give one "
                f"per shared link, or none",
                "unknown",
            )
        found = []
        for link, order, nodes in zip(self._placement.cluster.shared, orders, self.of_links, strict=True):
            given = self._nodes(order)
            if sorted(given) != nodes:
                raise self._misserved(link.name, order, given, {*nodes})
            found.append(tuple(given))
        return tuple(found)

    def _nodes(self, order: Sequence[Transfer]) -> list[int]:
        """The node of each transfer; -1 where there is none. Of equal transfers, the first is on the first route."""
        placement = self._placement
        num_components, tasks = placement.num_components, placement.tasks
        ways: dict[tuple[int, int, int], list[tuple[str, str, int, int, int, range]]] = {}
        for r, first in self.first.items():
            a, b, sender, receiver, num_bytes = placement.routes[r][:5]
            way = tasks[a].kind, tasks[b].kind, sender, num_bytes, first, self._microbatches_on(r)
            ways.setdefault((tasks[a].stage, tasks[b].stage, receiver), []).append(way)
        nodes: list[int] = []
        taken: set[int] = set()
        for (stage, kind, microbatch), (reader, read_by, same), by, to, size in order:
            node = -1
            for source, target, sender, num_bytes, first, batches in ways.get((stage, reader, to), ()):
                is_it = kind == source and read_by == target and by == sender
                if not is_it or microbatch != same or microbatch not in batches:
                    continue
                if size == placement.value(num_bytes, microbatch) and (node < 0 or node in taken):
                    node = first + microbatch // num_components
            nodes.append(node)
            taken.add(node)
        return nodes

    def _misserved(self, link: str, order: Sequence[Transfer], given: list[int], expected: set[int]) -> PlanError:
        missing = set(expected)
        for transfer, node in zip(order, given, strict=True):
            if node not in expected:
                return PlanError(f"{link} serves {transfer}, a transfer that does not use it; remove it", "unknown")
            if node not in missing:
                return PlanError(f"{link} serves {transfer} twice; remove one of them", "duplicate")
            missing.remove(node)
        transfer = next(transfer for node, transfer in self.transfers() if node in missing)
        return PlanError(f"{link} never serves {transfer}; add it there", "missing")


def microbatches_on(placement: Placement, num_microbatches: int, route: int) -> range:
    """The micro-batches, of a step with `num_microbatches`, whose data travels on `placement.routes[route]`."""
    return placement.microbatches(placement.tasks[placement.routes[route].source].stage, num_microbatches)


# --- in a plan's file -------------------------------------------------------------------------------------------------


def to_texts(placement: Placement, orders: Orders) -> list[str]:
    """Service orders as rows of "2F0>3F0@3": an op, its reader, and the rank that receives."""
    ends: dict[tuple[int, ...], list[tuple[int, str]]] = {}
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
    tasks, found = placement.tasks, []
    routes = {
        (str(tasks[route.source]), str(tasks[route.target]), text): r
        for r, (route, text) in enumerate(zip(placement.routes, _route_texts(placement), strict=True))
    }
    for text in row.split():
        ops, at, receiver = text.partition("@")
        pair = schedule_csv.parse_ops(ops.split(">"), path)
        names = [f"{op.stage}{op.kind}" for op in pair]
        route = routes.get((names[0], names[1], at + receiver)) if len(pair) == 2 else None
        batches = range(0) if route is None else microbatches_on(placement, num_microbatches, route)
        if route is None or pair[0].microbatch != pair[1].microbatch or pair[0].microbatch not in batches:
            expected = "the plan has none"
            if routes:
                (a, b, to), first = next(iter(routes.items()))
                m = next(iter(microbatches_on(placement, num_microbatches, first)), 0)
                expected = f"expected one such as {a}{m}>{b}{m}{to}"
            raise FormatError(f"{path}: {reading.short(text)} is not a transfer; {expected}")
        found.append(placement.transfer(route, pair[0].microbatch))
    return tuple(found)


def _route_texts(placement: Placement) -> list[str]:
    """What tells routes between two tasks apart: the receiver, "@3"; of parallel ones also a number, "@3#1"."""
    counts: Counter[tuple[int, int, int]] = Counter()
    texts = []
    for source, target, _, receiver, *_ in placement.routes:
        number = counts[source, target, receiver]
        counts[source, target, receiver] += 1
        texts.append(f"@{receiver}#{number}" if number else f"@{receiver}")
    return texts
