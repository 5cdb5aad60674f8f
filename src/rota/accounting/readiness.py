"""When each op of a timeline could have started, and what it waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rota.plan import Transfer
from rota.tasks import Op
from rota.timeline import Timeline

_LOCAL = -1  # in place of a route: the input never left the rank


class Place(NamedTuple):
    """The op at `position` of a rank's order."""

    rank: int
    position: int


class Arrival(NamedTuple):
    """What `maker` made at `made_us` was there at `arrived_us`; `route` is -1 where it did not travel."""

    arrived_us: int
    made_us: int
    maker: Place
    route: int


class Readiness:
    """Of one timeline: where each input of each op came from. Linear in the number of ops."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        plan = self.plan = timeline.plan
        self._streams = plan.placement.num_streams
        self._positions = [{node: i for i, node in enumerate(nodes)} for nodes in plan.nodes]
        # For each (rank, task): (source task, route or _LOCAL, the rank that made it) of each of its inputs.
        self._inputs: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        routes: dict[tuple[int, int, int], list[int]] = {}
        for i, route in enumerate(plan.placement.routes):
            routes.setdefault((route.source, route.target, route.receiver), []).append(i)
        for t, task in enumerate(plan.placement.tasks):
            sources = sorted({edge.source for edge in plan.placement.edges if edge.target == t})
            for rank in task.ranks:
                found = self._inputs[rank, t] = []
                for source in sources:  # each perhaps along several edges
                    travelled = routes.get((source, t, rank), [])
                    found += [(source, i, plan.placement.routes[i].sender) for i in travelled]
                    if not travelled:
                        found.append((source, _LOCAL, rank))

    def op(self, place: Place) -> Op:
        return self.plan.orders[place.rank][place.position]

    def start_us(self, place: Place) -> int:
        return self.timeline.starts_us[place.rank][place.position]

    def end_us(self, place: Place) -> int:
        return self.timeline.ends_us[place.rank][place.position]

    def transfer(self, arrival: Arrival, reader: Op) -> Transfer:
        """The transfer by which an input that travelled came to `reader`."""
        route = self.plan.placement.routes[arrival.route]
        target = self.plan.placement.tasks[route.target]
        read_by = Op(target.stage, target.kind, reader.microbatch)
        return Transfer(self.op(arrival.maker), read_by, route.sender, route.receiver, route.num_bytes)

    def arrivals(self, rank: int, op: Op) -> Iterator[Arrival]:
        """Of all that `op` reads on `rank`; what the other ranks of a task read is not among it."""
        first, k = self.plan.first_node, op.microbatch // self._streams
        for source, route, sender in self._inputs[rank, self.plan.placement.index[op.stage, op.kind]]:
            position = self._positions[sender][first[source] + k]
            made = self.timeline.ends_us[sender][position]
            arrived = made if route < 0 else max(made, self.timeline.arrived_us[route][k])
            yield Arrival(arrived, made, Place(sender, position), route)

    def last_arrival(self, place: Place) -> Arrival | None:
        """What came last of all that the op needs: its inputs, and the ranks that do it together with this one."""
        op, rank = self.op(place), place.rank
        needs = list(self.arrivals(rank, op))
        for other in self.plan.placement.tasks[self.plan.placement.index[op.stage, op.kind]].ranks:
            if other != rank:
                needs += self.arrivals(other, op)
                before = self._positions[other][self.plan.node(op)] - 1
                if before >= 0:
                    ended = self.timeline.ends_us[other][before]
                    needs.append(Arrival(ended, ended, Place(other, before), _LOCAL))
        return max(needs, default=None)

    def ready_us(self, rank: int) -> list[int]:
        """For each op of a rank's order when all that it reads had arrived."""
        first, streams = self.plan.first_node, self._streams
        arrived, ends, positions = self.timeline.arrived_us, self.timeline.ends_us[rank], self._positions[rank]
        index, ready = self.plan.placement.index, []
        for stage, kind, microbatch in self.plan.orders[rank]:
            k, latest = microbatch // streams, 0
            for source, route, _ in self._inputs[rank, index[stage, kind]]:
                time = arrived[route][k] if route >= 0 else ends[positions[first[source] + k]]
                if time > latest:
                    latest = time
            ready.append(latest)
        return ready

    def before(self, place: Place) -> Place | None:
        """The op whose end let this one start: the rank's op before it, or the maker of what came last."""
        arrival = self.last_arrival(place)
        previous = Place(place.rank, place.position - 1) if place.position else None
        if arrival is None or (previous is not None and self.end_us(previous) >= arrival.arrived_us):
            return previous
        return arrival.maker
