"""Contention: what is lost to others by those who share cores or a link."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from rota.core.plan import Plan


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


def service_starts_us(
    plan: Plan, sent_us: Sequence[Sequence[int]], arrived_us: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """When shared links began to serve each transfer, from when it was sent and when it arrived.

    A transfer waits while its links serve those that they finish before it, or, if they divide their rate, for as long
    as it lost to others. A wait is never longer than what the transfer took beyond its planned time. Transfers that
    share no link begin when they are sent, and so do those of a simulated timeline: its times contain no wait.

    Args:
        plan: The plan.
        sent_us: When each transfer was sent, by route and position, as in a `Timeline`.
        arrived_us: When it arrived.

    Returns:
        The starts, by route and position.
    """
    begun = [[*column] for column in sent_us]
    routes, value = plan.placement.routes, plan.placement.value
    spans: list[list[tuple[int, int]]] = [[] for _ in plan.placement.cluster.shared]
    served = []  # by the end of service; after it, the latency is left
    for r in plan.services.first:
        for k, (m, sent, arrived) in enumerate(zip(plan.microbatches_on(r), sent_us[r], arrived_us[r], strict=True)):
            duration_us, service_us = value(routes[r].duration_us, m), value(routes[r].service_us, m)
            served.append((arrived - duration_us + service_us, r, k, arrived - duration_us, service_us))
            for i in routes[r].shared:
                spans[i].append((sent, arrived))
    links = [Contention(of_link, 1) for of_link in spans]
    free_us = [0] * len(links)
    for _, r, k, latest_us, service_us in sorted(served):
        sent, arrived, shared = sent_us[r][k], arrived_us[r][k], routes[r].shared
        in_turn_us = max(sent, min(latest_us, max(free_us[i] for i in shared)))
        lost_us = max(links[i].lost_us(sent, arrived) for i in shared)
        begun[r][k] = max(in_turn_us, min(latest_us, sent + lost_us))
        for i in shared:
            free_us[i] = min(in_turn_us + service_us, arrived)
    return tuple(map(tuple, begun))
