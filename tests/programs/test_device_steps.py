"""What a rank enqueues: the plan's strict order, with buffers, events and collectives in their places."""

from collections.abc import Iterable, Iterator

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placement import Placement
from rota.core.placing import place
from rota.core.plan import Plan
from rota.core.programs.actions import Action, compile_programs, prefetch_receives
from rota.core.programs.device_steps import DeviceProgram, device_programs
from rota.core.simulation import simulate
from rota.core.tasks import Edge, Transfer
from rota.schedules import gpipe, one_f_one_b
from support import device_clock
from support.device_orders import family_plans
from support.random_plans import random_plan, with_random_wires


def many() -> Iterator[tuple[Plan, list[DeviceProgram]]]:
    for seed in range(100):
        plan = random_plan(seed, 2 + seed % 5)[1]
        if seed % 2:
            plan = with_random_wires(plan, seed)
        yield plan, device_programs(plan, tied=[(0, 1)])


def index_of(plan: Plan) -> dict[tuple[int, int], int]:
    return {edge: i for i, edge in enumerate(plan.placement.stage_edges)}


def test_actions_are_enqueued_in_the_strict_order() -> None:
    for plan, devices in many():
        for program, device in zip(compile_programs(plan, index_of(plan), range(plan.num_ranks)), devices, strict=True):
            enqueued = [(s.what, s.subject) for s in device.steps if s.what in ("run", "send", "receive")]
            assert enqueued == [(a.what, a.message.transfer if a.message else a.op) for a in program.actions]


def test_each_step_waits_for_what_it_needs_and_for_nothing_else() -> None:
    """Without one of these waits, tests/sim_device/test_mutations.py finds a race."""
    waits = {
        (step.what, device.steps[before].what)
        for _, devices in many()
        for device in devices
        for step in device.steps
        for before in step.waits
    }
    assert waits == {
        *(("receive", "allocate"), ("run", "receive"), ("send", "run"), ("release", "send")),
        *(("reduce", "run"), ("join", "reduce"), ("sum", "join"), ("join", "sum")),
    }


def test_a_receive_may_start_with_the_op_during_which_its_message_is_sent() -> None:
    """Not before, as it would wait on the device; but no earlier than receives are posted on a host, for the memory."""
    num_early = num_late = 0
    for plan, devices in many():
        timeline = simulate(plan)
        for program, device in zip(compile_programs(plan, index_of(plan), range(plan.num_ranks)), devices, strict=True):
            enqueued = ops_before_receives(program.actions)
            posted = ops_before_receives(prefetch_receives(plan, program.rank, program.actions))
            num_ops = 0
            for step in device.steps:
                num_ops += step.what == "run"
                if step.what == "allocate" and step.message is not None:
                    transfer, (route, k) = step.message.transfer, step.message.column
                    ended = sum(end <= timeline.sent_us[route][k] for end in timeline.ends_us[program.rank])
                    assert num_ops == min(max(posted[transfer], ended), enqueued[transfer])
                    num_early += num_ops < enqueued[transfer]
                    num_late += num_ops > posted[transfer]
    assert num_early > 50
    assert num_late > 100


def ops_before_receives(actions: Iterable[Action]) -> dict[Transfer, int]:
    num_ops, before = 0, {}
    for action in actions:
        num_ops += action.what == "run"
        if action.message and action.what == "receive":
            before[action.message.transfer] = num_ops
    return before


def test_kernels_that_start_late_delay_nothing() -> None:
    """Where a transfer takes less time than an op, all ops run when the plan says, though a message waits for both."""
    num_waiting = 0
    for plan in family_plans(ranks=(2, 4), latencies_us=(0, 5)):
        programs, timeline = device_programs(plan), simulate(plan)
        times = device_clock.run(plan, programs)
        for rank, device in enumerate(programs):
            starts_us = [us for us, step in zip(times.starts_us[rank], device.steps, strict=True) if step.what == "run"]
            assert tuple(starts_us) == timeline.starts_us[rank]
            waited = (meets > start for start, meets in zip(times.starts_us[rank], times.meets_us[rank], strict=True))
            num_waiting += sum(step.what == "receive" and late for step, late in zip(device.steps, waited, strict=True))
    assert num_waiting > 0


def test_with_a_limit_sent_values_are_released_when_the_plan_has_them_sent() -> None:
    """Their bytes count until then, and the next op may need them."""
    costs = Costs.uniform(3, 10, 20, activation_bytes=50, boundary_bytes=10)
    free = one_f_one_b(place(costs, Cluster.uniform(3, latency_us=15)), 6)
    limits = tuple(simulate(free).peak_memory_bytes)
    plan = one_f_one_b(place(costs, Cluster.uniform(3, max(limits), latency_us=15)), 6)
    timeline = simulate(plan)
    arrived = {t: end for t, _, end in spans(plan)}
    for device in device_programs(plan):
        num_ops = 0
        for step in device.steps:
            num_ops += step.what == "run"
            if step.what == "release":
                starts = timeline.starts_us[device.rank]
                later = [start for start in starts[num_ops:] if start < arrived[step.subject]]  # type: ignore[index]
                assert later == []
                assert num_ops == 0 or starts[num_ops - 1] < arrived[step.subject]  # type: ignore[index]


def spans(plan: Plan) -> Iterator[tuple[Transfer, int, int]]:
    timeline = simulate(plan)
    for program in compile_programs(plan, index_of(plan), range(plan.num_ranks)):
        for action in program.actions:
            if action.message and action.what == "send":
                r, k = action.message.column
                yield action.message.transfer, timeline.sent_us[r][k], timeline.arrived_us[r][k]


def test_collectives_have_their_place() -> None:
    placement = place(Costs.uniform(3), Cluster.uniform(3), [0, (1, 2), 0], [(0, 1), (1, 2)])
    first, second, _ = device_programs(gpipe(placement, 2), tied=[(0, 2), (0, 1)])
    together = [step for step in second.steps if step.what == "run"]
    assert {str(step.communicator) for step in together} == {"stages on ranks 1, 2"}
    names = [str(step) for step in first.steps]
    assert names[-4:] == ["join", "sum of tied weights on ranks 0, 2", "sum of tied weights on ranks 0, 1", "join"]
    assert [name for name in names if name.startswith("reduce")] == ["reduce 2B1", "reduce 0B1"]
    assert names.index("reduce 2B1") < names.index("run 0B1")
    ended = first.steps[names.index("join")]
    assert [names[w] for w in ended.waits] == ["reduce 2B1", "reduce 0B1"]
    alone = device_programs(gpipe(placement, 2), replicas=False)
    assert not any(step.what == "reduce" for device in alone for step in device.steps)


def test_an_edge_that_a_placement_has_twice_is_two_messages() -> None:
    once = place(Costs.uniform(2), Cluster.uniform(2))
    twice = Placement(once.tasks, (*once.edges, Edge(*once.edges[0])), once.cluster)
    programs = device_programs(gpipe(twice, 2))
    assert sum(step.what == "send" for step in programs[0].steps) == 4
    assert sum(step.what == "release" for step in programs[0].steps) == 4
