"""The simulated times are the earliest that the definition allows, and memory is what a naive replay counts."""

from dataclasses import replace

from hypothesis import given, settings

from rota import Cluster, Costs, Kind, Link, Op, Plan, Timeline, place, schedules, simulate
from support import recount as counting
from support.core_strategies import differing_plans, plans, wired_plans
from support.recount import figure_of, recount
from support.sampling import some

F, B = Kind.F, Kind.B


def times(timeline: Timeline) -> dict[tuple[int, Op], tuple[int, int]]:
    """(rank, op) -> (start, end), read from the columns."""
    return {
        (rank, op): (timeline.starts_us[rank][i], timeline.ends_us[rank][i])
        for rank, order in enumerate(timeline.plan.orders)
        for i, op in enumerate(order)
    }


@given(plans() | wired_plans() | differing_plans() | differing_plans(wired=True))
@settings(max_examples=some(600))
def test_all_times_match_a_count_of_every_microsecond(plan: Plan) -> None:
    timeline, counted = simulate(plan), counting.recount(plan)
    at = times(timeline)
    assert at == counted.ops
    expected = [(each.transfer.sender, each.sent_us, each.arrived_us, each.transfer) for each in counted.messages]
    assert sorted(timeline.transfer_spans()) == sorted(expected)
    ends = counting.step_end_times(plan, counted)
    assert list(timeline.step_ends_us) == ends
    assert timeline.makespan_us == max([counted.makespan_us, *(end for row in ends for end in row)])
    assert timeline.span_us == max(_window(counted, rank) for rank in range(plan.num_ranks))


def _window(counted: counting.Recount, rank: int) -> int:
    spans = [span for (on, _), span in counted.ops.items() if on == rank]
    return max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0


@given(wired_plans())
@settings(max_examples=some(200))
def test_the_order_of_first_come_first_served_written_down_changes_nothing(plan: Plan) -> None:
    plan = replace(plan, service_orders=())
    found = [[(time, node) for node in nodes for time in [plan.earliest.starts_us[node]]] for nodes in plan.served]
    assert all(order == sorted(order) for order in found)
    nodes = dict(plan.shared_transfers.transfers())
    written = replace(plan, service_orders=tuple(tuple(nodes[node] for node in order) for order in plan.served))
    assert simulate(written).ends_us == simulate(plan).ends_us
    assert simulate(written).sent_us == simulate(plan).sent_us
    assert written.served == plan.served


def test_a_chain_by_hand() -> None:
    costs = Costs((2, 3), (4, 5), boundary_bytes=10, reduce_us=1, optimizer_us=(1, 2))
    placement = place(costs, Cluster((None, None), Link(1, 4)))  # 1 + ceil(10 / 4) = 4
    timeline = simulate(schedules.gpipe(placement, 2))
    assert timeline.starts_us == ((0, 2, 21, 26), (6, 9, 12, 17))
    assert timeline.ends_us == ((2, 4, 25, 30), (9, 12, 17, 22))
    assert timeline.sent_us == ((2, 4), (17, 22))
    assert timeline.arrived_us == ((6, 8), (21, 26))
    assert timeline.step_ends_us == ((30, 31, 31, 32), (22, 23, 23, 25))
    assert timeline.makespan_us == 32
    assert timeline.span_us == 30
    assert timeline.busy_us == (12, 16)
    assert timeline.idle_us == (20, 16)
    assert timeline.bubble_fraction == 36 / 64


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

    def after(self, now: int) -> int:
        """When all that happens at `now` has happened."""
        return self.holds(sum(start <= now for start in self.starts), sum(end <= now for end in self.ends), now)

    def instants(self) -> list[int]:
        each = self.transfers + self.held_by_sender
        sent = [time for start, end, transfer in each if self.rank in transfer[2:4] for time in (start, end)]
        return sorted({0, *self.starts, *self.ends, *sent})

    def peak(self) -> int:
        """The most at any moment; before the first, the static bytes."""
        moments = [self.holds(started=i + 1, ended=i, now=now) for i, now in enumerate(self.starts)]
        moments += map(self.after, self.instants())
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
