"""Every µs by which a timeline ends later than its plan, by one cause.

The plan is simulated again and again, each time with one thing more as it was measured, until all of it is. So the
makespan grows from the planned to the measured one, and what it grows by in a step is one cause's part. What remains
can only be clocks, by which something was read before it had arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cached_property
from typing import final

from rota.accounting.lateness import Crowd
from rota.accounting.readiness import Place, Readiness
from rota.placement import StepEnd
from rota.plan import Plan
from rota.taskgraph import TaskGraph
from rota.timeline import Timeline


class Part(StrEnum):
    """Where a difference in makespan comes from, in the order in which what was measured takes the plan's place."""

    SLOWER = "slower ops"  #: ops take what they took
    CORES = "shared cores"  #: of that, and of launch gaps, what is lost where busy ranks are more than cores
    ARRIVALS = "later arrivals"  #: transfers take what they took
    CONTENTION = "contention"  #: of that, what they lost to others on the same link at the same time
    SENDS = "late sends"  #: a transfer starts after what it sends was made
    LAUNCH = "launch gaps"  #: an op starts after all that it needs was there, or the ranks of a task start apart
    STEP_END = "step end"  #: reductions and optimizer steps, when they start and what they take
    CLOCK = "clocks"  #: by the clocks, something was read before it had arrived


def parts_us(plan: Plan, timeline: Timeline, num_cores: int | None) -> dict[Part, int]:
    """By how much `timeline` ends later than `plan`, simulated; the parts add up to it exactly."""
    replay = _Replay(plan, timeline, num_cores)
    ends = [replay.makespan_us(steps) for steps in range(len(Part))]
    ends.append(timeline.makespan_us)
    return {part: after - before for part, before, after in zip(Part, ends, ends[1:], strict=False)}


@final
class _Replay:
    """A node for each op on each of its ranks, then two for each step end: a reduction and an optimizer step.

    Data: what a node itself reads and the op before it on its rank. Several ranks that do a task together start
    together, as planned: each waits for what the others need, too.
    """

    def __init__(self, plan: Plan, timeline: Timeline, num_cores: int | None) -> None:
        self._timeline, self._num_cores = timeline, num_cores
        self._plan = _with_step_ends(plan, timeline.plan)
        self._readiness = Readiness(timeline)
        self._first = [0]
        for order in plan.orders:
            self._first.append(self._first[-1] + len(order))
        self._places = [Place(rank, i) for rank, order in enumerate(plan.orders) for i in range(len(order))]

    def makespan_us(self, num_steps: int) -> int:
        """With the first `num_steps` parts as measured."""
        measured = [*Part][:num_steps]
        durations, lags = self._durations(measured), self._lags(measured)
        inputs: list[Sequence[tuple[int, int]]] = []
        for place, own in zip(self._places, self._inputs, strict=True):
            before = [(self._node(place) - 1, 0)] if place.position else []
            reads = own if Part.LAUNCH in measured else self._together(place)
            inputs.append([*before, *((node, 0 if route < 0 else lags(route, k)) for node, route, k in reads)])
        inputs += [[(node, 0) for node in nodes] for nodes in self._step_end_inputs(Part.STEP_END not in measured)]
        return max(TaskGraph(durations, inputs).earliest().ends_us, default=0)

    def _node(self, place: Place) -> int:
        return self._first[place.rank] + place.position

    # --- what waits for what ----------------------------------------------------------------------------------------

    @cached_property
    def _inputs(self) -> list[list[tuple[int, int, int]]]:
        """For each op's node what it reads: (node, route or -1, position among the route's transfers)."""
        streams = self._plan.placement.num_streams
        result = []
        for place in self._places:
            op = self._readiness.op(place)
            arrivals = self._readiness.arrivals(place.rank, op)
            result.append([(self._node(one.maker), one.route, op.microbatch // streams) for one in arrivals])
        return result

    def _together(self, place: Place) -> Iterator[tuple[int, int, int]]:
        """What the op waits for on all its ranks."""
        op = self._readiness.op(place)
        ranks = self._plan.placement.tasks[self._plan.placement.index[op.stage, op.kind]].ranks
        if len(ranks) == 1:
            yield from self._inputs[self._node(place)]
            return
        for rank in ranks:
            node = self._first[rank] + self._positions[rank][self._plan.node(op)]
            yield from self._inputs[node]
            if node > self._first[rank]:
                yield node - 1, -1, 0

    @cached_property
    def _positions(self) -> list[dict[int, int]]:
        return [{node: i for i, node in enumerate(nodes)} for nodes in self._plan.nodes]

    def _step_end_inputs(self, in_turn: bool) -> list[list[int]]:
        """Of each reduction and optimizer step; `in_turn`: as planned, those of a rank one after the other."""
        plan, num_nodes, result = self._plan, len(self._places), []
        for j, (_, rank) in enumerate(plan.step_end_ranks):
            reduction = plan.num_ops + 2 * j
            for node in (reduction, reduction + 1):
                before = [source for source, _ in plan.graph.inputs[node]]
                ops = [self._first[rank] + self._positions[rank][source] for source in before if source < plan.num_ops]
                ends = [source for source in before if source >= plan.num_ops]
                if not in_turn:
                    ends = [reduction] if node > reduction else []
                    ops = ops if node == reduction else [*range(self._first[rank], self._first[rank + 1])[-1:]]
                result.append(ops + [num_nodes + source - plan.num_ops for source in ends])
        return result

    # --- what everything takes --------------------------------------------------------------------------------------

    def _durations(self, measured: Sequence[Part]) -> list[int]:
        """Of each node, with the time that it starts late in front."""
        plan, result = self._plan, []
        for place in self._places:
            op = self._readiness.op(place)
            us = planned = plan.placement.tasks[plan.placement.index[op.stage, op.kind]].duration_us
            start, end = self._readiness.start_us(place), self._readiness.end_us(place)
            if Part.SLOWER in measured:
                us = end - start
            if Part.CORES not in measured:
                us -= min(max(us - planned, 0), self._crowd.lost_us(start, end) if self._crowd else 0)
            late = self._late_us(place)
            result.append(us + (late[0] if Part.CORES in measured else 0) + (late[1] if Part.LAUNCH in measured else 0))
        for i, rank in plan.step_end_ranks:
            step_end = plan.placement.step_ends[i]
            if Part.STEP_END in measured:
                result += self._step_end_us.get((step_end.stage, rank), (0, 0))
            else:
                result += [step_end.reduce_us, step_end.optimizer_us]
        return result

    def _late_us(self, place: Place) -> tuple[int, int]:
        """How long the op was ready while other ranks had all cores, and while they had not."""
        arrivals = self._readiness.arrivals(place.rank, self._readiness.op(place))
        before = self._readiness.end_us(place._replace(position=place.position - 1)) if place.position else 0
        ready_us = max((one.arrived_us for one in arrivals), default=0)
        ready_us, start_us = max(ready_us, before), self._readiness.start_us(place)
        full = self._crowd.full(ready_us, start_us) if self._crowd and ready_us < start_us else ()
        full_us = sum(b - a for a, b in full)
        return full_us, max(start_us - ready_us, 0) - full_us

    @cached_property
    def _step_end_us(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """By stage and rank what a reduction and an optimizer step took, and how late they started."""
        found, timeline, inputs = {}, self._timeline, self._step_end_inputs(in_turn=False)
        ends = [end for column in timeline.ends_us for end in column]
        pairs = [(timeline.plan.placement.step_ends[i].stage, rank) for i, rank in timeline.plan.step_end_ranks]
        measured = dict(zip(pairs, timeline.step_ends_us, strict=True))
        for j, (i, rank) in enumerate(self._plan.step_end_ranks):
            stage = self._plan.placement.step_ends[i].stage
            a, b, c, d = measured.get((stage, rank), (0, 0, 0, 0))
            late = []
            for node, (start, end) in zip(inputs[2 * j : 2 * j + 2], ((a, b), (c, d)), strict=True):
                late.append(max(start - max((ends[before] for before in node), default=0), 0))
                ends.append(end)
            found[stage, rank] = b - a + late[0], d - c + late[1]
        return found

    def _lags(self, measured: Sequence[Part]) -> Callable[[int, int], int]:
        """Of a route's k-th transfer."""
        routes, timeline = self._plan.placement.routes, self._timeline

        def lag(route: int, k: int) -> int:
            us = routes[route].duration_us
            sent, arrived = timeline.sent_us[route][k], timeline.arrived_us[route][k]
            if Part.ARRIVALS in measured:
                lost = 0 if Part.CONTENTION in measured else self._links[routes[route][2:4]].lost_us(sent, arrived)
                excess = max(arrived - sent - us, 0)
                us = max(arrived - sent, 0) - min(excess, lost)
            if Part.SENDS in measured:
                us += max(sent - self._made_us(route, k), 0)
            return us

        return lag

    def _made_us(self, route: int, k: int) -> int:
        source, rank = self._plan.placement.routes[route].source, self._plan.placement.routes[route].sender
        return self._timeline.ends_us[rank][self._positions[rank][self._plan.first_node[source] + k]]

    # --- what is shared ---------------------------------------------------------------------------------------------

    @cached_property
    def _crowd(self) -> Crowd | None:
        times = ((span.start_us, span.end_us) for span in self._timeline.op_spans())
        return Crowd(times, self._num_cores) if self._num_cores else None

    @cached_property
    def _links(self) -> dict[tuple[int, ...], Crowd]:
        """By sender and receiver."""
        times: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        timeline = self._timeline
        for route, sent, arrived in zip(
            self._plan.placement.routes, timeline.sent_us, timeline.arrived_us, strict=True
        ):
            times.setdefault(route[2:4], []).extend(zip(sent, arrived, strict=True))
        return {pair: Crowd(on_it, 1) for pair, on_it in times.items()}


def _with_step_ends(plan: Plan, other: Plan) -> Plan:
    """With those that only the other one has; they take no time."""
    known = {end.stage for end in plan.placement.step_ends}
    more = tuple(StepEnd(end.stage, 0, 0) for end in other.placement.step_ends if end.stage not in known)
    if not more:
        return plan
    return replace(plan, placement=replace(plan.placement, step_ends=plan.placement.step_ends + more))
