"""Memory over time against the definition, replayed in the most naive way: who is held at this moment?"""

from __future__ import annotations

from hypothesis import given, settings

from rota import schedules
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import place
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.tasks import Kind
from rota.core.timeline import Timeline
from support.core_strategies import differing_plans, plans, wired_plans
from support.recount import figure_of, recount
from support.sampling import some

F, B = Kind.F, Kind.B


class Replay:
    """One rank of a timeline, asked at single moments.

    At one instant, what ends frees first, then what arrives takes, then the ops that start take, in the rank's order;
    one that takes no time has ended when the next one is seen.
    """

    def __init__(self, timeline: Timeline, rank: int) -> None:
        self.plan, self.rank = timeline.plan, rank
        self.order = timeline.plan.orders[rank]
        self.starts, self.ends = timeline.starts_us[rank], timeline.ends_us[rank]
        counted = recount(self.plan)
        self.transfers = [(m.sent_us, m.arrived_us, m.transfer) for m in counted.messages]
        self.held_by_sender = [(m.handed_over_us, m.arrived_us, m.transfer) for m in counted.messages]

    def holds(self, started: int, ended: int, now: int) -> int:
        """Bytes when the first `started` ops of the order have started and the first `ended` of them have ended."""
        total = self.plan.placement.static_bytes[self.rank]
        for i, op in enumerate(self.order[:started]):
            task = self.plan.placement.task(op.stage, op.kind)
            held = figure_of(self.plan.placement, task.held_bytes, op.microbatch)
            if held > 0 or i < ended:
                total += held
            if i >= ended:
                total += figure_of(self.plan.placement, task.peak_bytes, op.microbatch)
        for start, end, transfer in self.held_by_sender:
            if transfer.sender == self.rank and start <= now < end:
                total += transfer.num_bytes
        for start, _, transfer in self.transfers:
            if transfer.receiver == self.rank and start <= now and transfer.target not in self.order[:ended]:
                total += transfer.num_bytes
        return total

    def at_op(self, i: int) -> int:
        return self.holds(started=i + 1, ended=i, now=self.starts[i])

    def after(self, now: int) -> int:
        """When all that happens at `now` has happened."""
        return self.holds(sum(start <= now for start in self.starts), sum(end <= now for end in self.ends), now)

    def instants(self) -> list[int]:
        each = self.transfers + self.held_by_sender
        sent = [time for start, end, transfer in each if self.rank in transfer[2:4] for time in (start, end)]
        return sorted({0, *self.starts, *self.ends, *sent})

    def peak(self) -> int:
        """The most at any moment; before the first, the static bytes."""
        moments = [self.at_op(i) for i in range(len(self.order))] + [self.after(now) for now in self.instants()]
        return max(self.plan.placement.static_bytes[self.rank], *moments)


@given(plans() | wired_plans() | differing_plans() | differing_plans(wired=True))
@settings(max_examples=some(400))
def test_peak_and_every_instant_match_the_naive_replay(plan: Plan) -> None:
    timeline = simulate(plan)
    for rank in range(plan.num_ranks):
        replay = Replay(timeline, rank)
        level, curve = plan.placement.static_bytes[rank], dict(timeline.memory(rank))
        assert list(curve) == sorted(curve)
        assert set(curve) <= set(replay.instants())
        for now in replay.instants():
            level = curve.get(now, level)
            assert level == replay.after(now)
        assert timeline.peak_memory_bytes[rank] == replay.peak()


def test_gpipe_holds_every_micro_batch_and_1f1b_few() -> None:
    placement = place(Costs.uniform(4, activation_bytes=100, static_bytes=7), Cluster.uniform(4))
    assert simulate(schedules.gpipe(placement, 8)).peak_memory_bytes == (807,) * 4
    assert simulate(schedules.one_f_one_b(placement, 8)).peak_memory_bytes == (407, 307, 207, 107)
