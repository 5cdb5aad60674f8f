"""Why ops of a timeline started when they did: inputs, ops that ran longer than planned, and shared resources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rota.accounting.causes import Cause, Idle
from rota.core.errors import PlanError
from rota.core.shared_links import Contention
from rota.core.tasks import Op
from rota.core.timeline import Timeline

_LOCAL = -1  # instead of a route: the input stayed on the rank


class Place(NamedTuple):
    """The op at `position` of a rank's order."""

    rank: int
    position: int


class Arrival(NamedTuple):
    """The output of `maker`, complete at `made_us`, arrived at `arrived_us`; `route` is -1 if it stayed on its rank.

    In between it was sent, when its shared links were free.
    """

    arrived_us: int
    made_us: int
    maker: Place
    route: int
    sent_us: int


class Readiness:
    """Where each input of each op of a timeline came from, and when. Linear in the number of ops."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        plan = self.plan = timeline.plan
        self._num_components = plan.placement.num_components
        #: Per rank, the position of each of the plan's nodes in the rank's order.
        self.positions = [{node: i for i, node in enumerate(nodes)} for nodes in plan.nodes]
        # (rank, task) -> for each of its inputs (source task, route or _LOCAL, rank of the maker).
        self._inputs: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        routes: dict[tuple[int, int, int], list[int]] = {}
        for i, route in enumerate(plan.placement.routes):
            routes.setdefault((route.source, route.target, route.receiver), []).append(i)
        for t, task in enumerate(plan.placement.tasks):
            sources = sorted({edge.source for edge in plan.placement.edges if edge.target == t})
            for rank in task.ranks:
                inputs = self._inputs[rank, t] = []
                for source in sources:  # possibly along several edges
                    travelled = routes.get((source, t, rank), [])
                    received = [(source, i, plan.placement.routes[i].sender) for i in travelled]
                    inputs += received or [(source, _LOCAL, rank)]

    def op(self, place: Place) -> Op:
        """The op at `place`."""
        return self.plan.orders[place.rank][place.position]

    def start_us(self, place: Place) -> int:
        """When the op at `place` started."""
        return self.timeline.starts_us[place.rank][place.position]

    def end_us(self, place: Place) -> int:
        """When the op at `place` ended."""
        return self.timeline.ends_us[place.rank][place.position]

    def arrivals(self, rank: int, op: Op) -> Iterator[Arrival]:
        """Arrivals of all inputs of `op` on `rank`, without those of the task's other ranks."""
        first, k = self.plan.first_node, op.microbatch // self._num_components
        for source, route, sender in self._inputs[rank, self.plan.placement.index[op.stage, op.kind]]:
            position = self.positions[sender][first[source] + k]
            made = self.timeline.ends_us[sender][position]
            if route < 0:
                yield Arrival(made, made, Place(sender, position), route, made)
                continue
            arrived = max(made, self.timeline.arrived_us[route][k])
            is_shared = self.plan.placement.routes[route].shared  # else it waits for nothing
            sent = min(max(made, self.timeline.sent_us[route][k]), arrived) if is_shared else made
            yield Arrival(arrived, made, Place(sender, position), route, sent)

    def last_arrival(self, place: Place) -> Arrival | None:
        """The last arrival that the op needs: of its inputs, and of the other ranks that run the same task."""
        op = self.op(place)
        needs = list(self.arrivals(place.rank, op))
        for rank in self.plan.placement.tasks[self.plan.placement.index[op.stage, op.kind]].ranks:
            if rank != place.rank:
                needs += self.arrivals(rank, op)
                previous = Place(rank, self.positions[rank][self.plan.node(op)] - 1)
                if previous.position >= 0:
                    ended = self.end_us(previous)
                    needs.append(Arrival(ended, ended, previous, _LOCAL, ended))
        return max(needs, default=None)

    def ready_us(self, rank: int) -> list[int]:
        """For each op of a rank's order, when all of its inputs had arrived."""
        first, num_components = self.plan.first_node, self._num_components
        arrived, ends, positions = self.timeline.arrived_us, self.timeline.ends_us[rank], self.positions[rank]
        index, ready = self.plan.placement.index, []
        for stage, kind, microbatch in self.plan.orders[rank]:
            k, latest = microbatch // num_components, 0
            for source, route, _ in self._inputs[rank, index[stage, kind]]:
                latest = max(latest, arrived[route][k] if route >= 0 else ends[positions[first[source] + k]])
            ready.append(latest)
        return ready

    def predecessor(self, place: Place) -> Place | None:
        """The op whose end let this one start: the rank's previous op, or the maker of the last arrival."""
        arrival = self.last_arrival(place)
        previous = Place(place.rank, place.position - 1) if place.position else None
        if arrival is None or (previous is not None and self.end_us(previous) >= arrival.arrived_us):
            return previous
        return arrival.maker


def contention_of(timeline: Timeline, num_cores: int | None) -> Contention | None:
    """How busy the cores are that all ranks share; None if they share none, or it is not known."""
    times_us = ((span.start_us, span.end_us) for span in timeline.op_spans())
    return Contention(times_us, num_cores) if num_cores else None


class Overruns:
    """Where a timeline's ops run longer than in `planned`. Raises PlanError if `planned` lacks an op."""

    def __init__(self, readiness: Readiness, planned: Timeline, cores: Contention | None) -> None:
        self._readiness, self._cores = readiness, cores
        self._planned_us: list[dict[Op, int]] = []
        for times in zip(planned.plan.orders, planned.starts_us, planned.ends_us, strict=True):
            self._planned_us.append({op: end - start for op, start, end in zip(*times, strict=True)})
        for rank, order in enumerate(readiness.plan.orders):
            planned_ops = self._planned_us[rank] if rank < planned.num_ranks else {}
            if (extra := next((op for op in order if op not in planned_ops), None)) is not None:
                raise PlanError(
                    f"the plan has no {extra} on rank {rank}; explain a timeline by its own plan", "unknown"
                )

    def upstream(self, rank: int, last: Place, since_us: int, until_us: int) -> list[Idle]:
        """Time of an idle rank in which an op upstream of `last`, or `last` itself, ran longer than planned."""
        pieces: list[Idle] = []  # latest first
        place: Place | None = last
        while place is not None and self._readiness.end_us(place) > since_us:
            op, start, end = self._readiness.op(place), self._readiness.start_us(place), self._readiness.end_us(place)
            if (due := start + self._planned_us[place.rank][op]) < end:
                middle = min(due + (self._cores.lost_us(start, end) if self._cores else 0), end)
                for a, b, cause in ((middle, end, Cause.SLOWER), (due, middle, Cause.CORES)):
                    if max(a, since_us) < min(b, until_us):
                        pieces.append(Idle(rank, max(a, since_us), min(b, until_us), cause, op))
            place = self._readiness.predecessor(place) if start > since_us else None
        return pieces[::-1]
