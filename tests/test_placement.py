"""Tasks, edges and ranks of one micro-batch: what `place` makes, streams, routes, and what is refused."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rota import Cluster, Costs, FormatError, Link, Placement, PlacementError, SharedLink
from rota.core import reading
from rota.core.placement_file import PlacementFile, placement_fields, read_placement
from rota.core.placing import bidirectional, interleaved, place, wave
from rota.core.tasks import Edge, Kind, Op, Route, StepEnd, Task
from rota.shapes import k_shape, m_shape
from support.core_strategies import costs, ops, placements
from support.tessel_shapes import tessel

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
ONE = Cluster.uniform(1)


def named_edges(placement: Placement) -> list[tuple[str, str, int]]:
    return [(str(placement.tasks[a]), str(placement.tasks[b]), size) for a, b, size in placement.edges]


def test_a_chain_is_mirrored() -> None:
    given = Costs((1, 2), (3, 4), activation_bytes=(5, 6), boundary_bytes=7, gradient_bytes=8, static_bytes=(9, 10))
    placement = place(given, Cluster.uniform(2))
    assert placement.tasks == (
        Task(0, F, (0,), 1, 5),
        Task(1, F, (1,), 2, 6),
        Task(0, B, (0,), 3, -5),
        Task(1, B, (1,), 4, -6),
    )
    assert named_edges(placement) == [("0F", "1F", 7), ("1B", "0B", 8), ("0F", "0B", 0), ("1F", "1B", 0)]
    assert placement.static_bytes == (9, 10)
    assert placement.step_ends == ()


def test_a_split_backward_makes_i_and_w() -> None:
    given = Costs((1,), (2,), (3,), activation_bytes=9, input_frees_bytes=4, backward_peak_bytes=5, weight_peak_bytes=6)
    placement = place(given, ONE)
    assert placement.tasks == (Task(0, F, (0,), 1, 9), Task(0, I, (0,), 2, -4, 5), Task(0, W, (0,), 3, -5, 6))
    assert named_edges(placement) == [("0F", "0I", 0), ("0I", "0W", 0)]


@given(costs())
def test_every_forward_edge_has_a_backward_one_and_all_that_is_held_is_freed(given: Costs) -> None:
    placement = place(given, Cluster.uniform(given.num_stages))
    edges = {(a, b) for a, b, _ in named_edges(placement)}
    back = "B" if given.weight_us is None else "I"
    chain = tuple((i, i + 1) for i in range(given.num_stages - 1))
    assert placement.stage_edges == (chain if given.edges is None else given.edges)
    for a, b in placement.stage_edges:
        assert {(f"{a}F", f"{b}F"), (f"{b}{back}", f"{a}{back}")} <= edges
    for stage in placement.stages:
        assert sum(task.held_bytes for task in placement.tasks if task.stage == stage) == 0


def test_edges_may_be_given_with_the_costs_or_with_the_placement() -> None:
    assert place(Costs.uniform(3, edges=((0, 2),)), Cluster.uniform(3)).stage_edges == ((0, 2),)
    assert place(Costs.uniform(3), Cluster.uniform(3), edges=[(0, 2), (1, 2)]).stage_edges == ((0, 2), (1, 2))
    assert place(Costs.uniform(2, edges=()), Cluster.uniform(2)).num_components == 2  # none is not the same as a chain


def test_stages_share_ranks_and_tasks_span_them() -> None:
    given = Costs.uniform(3, static_bytes=(1, 10, 100), reduce_us=(0, 2, 0), optimizer_us=(0, 0, 3))
    placement = place(given, Cluster.uniform(3), ranks=(0, (2, 1), 1))
    assert placement.static_bytes == (1, 110, 10)
    assert [placement.stages_on(rank) for rank in range(3)] == [(0,), (1, 2), (1,)]
    assert placement.ranks_of(1) == (2, 1)
    assert placement.step_ends == (StepEnd(1, 2, 0), StepEnd(2, 0, 3))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: place(Costs.uniform(3), ONE, ranks=(0, 0)), "ranks has 2 entries for 3 stages; give one per stage"),
        (lambda: place(Costs.uniform(2), ONE), "task 1F is on rank 1, but the cluster has 1 ranks (0 to 0)"),
        (lambda: place(Costs.uniform(2), ONE, (0, 0), [(0, 2)]), "edge (0, 2) must join two of the stages 0 to 1"),
        (lambda: place(Costs.uniform(2), ONE, (0, 0), [(0, 1), (1, 0)]), "the edges form a cycle: "),
        (lambda: place(Costs.uniform(2), ONE, (0, ())), "ranks () must be one or more different ranks"),
        (
            lambda: place(Costs.uniform(3, boundary_bytes=(1, 2)), ONE, (0, 0, 0), [(0, 1)]),
            "boundary_bytes has 2 entries, but there are 1 edges; give one per edge, or one number for all",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused(make: object, told: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(told)):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("shape", [interleaved, wave, bidirectional])
def test_shapes_take_a_chain_with_or_without_its_edges(shape: Callable[[Costs, Cluster], Placement]) -> None:
    num_ranks = 4 if shape is bidirectional else 2
    without = Costs((1, 2, 3, 4), (5, 6, 7, 8), boundary_bytes=(7, 8, 9))
    cluster = Cluster.uniform(num_ranks)
    assert shape(replace(without, edges=((0, 1), (1, 2), (2, 3))), cluster) == shape(without, cluster)
    for edges, place_and_value in (
        (((0, 1), (0, 2), (2, 3)), r"edges\[1\] of the costs is \(0, 2\)"),
        (((0, 1), (1, 2)), r"edges\[2\] of the costs is missing"),
        (((0, 1), (1, 2), (2, 3), (0, 3)), r"edges\[3\] of the costs is \(0, 3\)"),
    ):
        with pytest.raises(PlacementError, match=f"{place_and_value}.*; for other graphs use rota.place, then gpipe"):
            shape(replace(without, boundary_bytes=1, edges=edges), cluster)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tasks": ()}, "a placement needs at least one task"),
        ({"tasks": (Task(0, F, (0,), 1),) * 2}, "task 0F appears twice; a stage has at most one task of each kind"),
        ({"edges": (Edge(0, 2),)}, "points outside the 2 tasks"),
        ({"edges": (Edge(0, 1, -3),)}, "num_bytes of the edge 0F -> 1F is -3"),
        ({"edges": (Edge(0, 1), Edge(1, 0))}, "the edges form a cycle: "),
        ({"static_bytes": (1, 2)}, "static_bytes has 2 entries for 1 ranks"),
        ({"step_ends": (StepEnd(7, 0, 0),)}, "step_ends names stage 7, which has no task"),
    ],
)
def test_a_placement_refuses_what_makes_no_sense(changed: dict[str, object], told: str) -> None:
    fields = {"tasks": (Task(0, F, (0,), 1), Task(1, F, (0,), 1)), "edges": (), "cluster": ONE}
    with pytest.raises(PlacementError, match=re.escape(told)):
        Placement(**{**fields, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize("times", [(-1, 0), (0, -1), (0, 0.5)])
def test_a_step_end_refuses_what_is_no_time(times: tuple[int, int]) -> None:
    with pytest.raises(PlacementError, match="of stage 3 is"):
        StepEnd(3, *times)


@given(placements)
def test_every_component_is_a_stream_of_its_own(placement: Placement) -> None:
    component = {task: {task} for task in placement.tasks}  # merge until nothing changes
    pairs = [(placement.tasks[a], placement.tasks[b]) for a, b, _ in placement.edges]
    pairs += [(a, b) for a in placement.tasks for b in placement.tasks if a.stage == b.stage]
    for _ in placement.tasks:
        for a, b in pairs:
            component[a] = component[b] = component[a] | component[b]
    groups = sorted({min(task.stage for task in group) for group in component.values()})
    assert placement.num_components == len(groups)
    for i, task in enumerate(placement.tasks):
        stream = groups.index(min(other.stage for other in component[task]))
        assert placement.component_of[i] == stream
        batches = placement.microbatches(task.stage, 7)
        assert list(batches) == [m for m in range(7) if m % len(groups) == stream]


def test_a_task_on_several_ranks_is_fed_rank_by_rank_or_from_the_first() -> None:
    tasks = (Task(0, F, (0, 1), 1), Task(1, F, (1, 2), 1), Task(2, F, (2, 0, 3), 1))
    links = ((1, 2, Link(5, 2)),)
    placement = Placement(tasks, (Edge(0, 1, 7), Edge(1, 2, 4)), Cluster((None,) * 4, Link(1), links))
    assert placement.routes == (
        Route(0, 1, 0, 1, 7, 1),
        Route(0, 1, 1, 2, 7, 9),
        Route(1, 2, 1, 2, 4, 7),
        Route(1, 2, 1, 0, 4, 1),
        Route(1, 2, 1, 3, 4, 1),
    )


def test_forward_only_keeps_forwards_that_hold_nothing() -> None:
    given = Costs.uniform(3, boundary_bytes=5, static_bytes=2, forward_peak_bytes=4, reduce_us=3)
    placement = place(given, Cluster.uniform(3)).forward_only()
    assert placement.tasks == tuple(Task(stage, F, (stage,), 1, 0, 4) for stage in range(3))
    assert placement.edges == (Edge(0, 1, 5), Edge(1, 2, 5))
    assert (placement.static_bytes, placement.step_ends) == ((2, 2, 2), ())


@given(placements)
def test_text_round_trip(placement: Placement) -> None:
    text = reading.dump("plan", PlacementFile(**placement_fields(placement)))
    again = read_placement(reading.parse(text, "plan").read(PlacementFile), "plan")
    assert again == placement
    assert (again.routes, again.component_of, again.index) == (
        placement.routes,
        placement.component_of,
        placement.index,
    )


def test_a_transfer_is_served_at_the_slowest_rate_and_never_faster_than_alone() -> None:
    tasks = (Task(0, F, (0,), 1), Task(1, F, (1,), 1))
    shared = SharedLink("host", 4, (0,), (1,)), SharedLink("bus", 2, (0,), (1,)), SharedLink("back", 1, (1,), (0,))

    def route(num_bytes: int, link: Link) -> Route:
        return Placement(tasks, (Edge(0, 1, num_bytes),), Cluster((None, None), link, shared=shared)).routes[0]

    assert route(9, Link(3, 100)) == Route(0, 1, 0, 1, 9, 3 + 5, 5, (0, 1))
    assert route(9, Link(3, 1)) == Route(0, 1, 0, 1, 9, 3 + 9, 5, (0, 1))
    assert route(0, Link(3, 1)) == Route(0, 1, 0, 1, 0, 3, 0, ())  # nothing to serve


def test_an_op_is_written_as_in_pytorchs_csv() -> None:
    assert str(Op(2, Kind.F, 0)) == "2F0"
    assert Op.parse(" 12W345\n") == Op(12, Kind.W, 345)


@given(ops)
def test_op_round_trip(op: Op) -> None:
    assert Op.parse(str(op)) == op


@given(st.text("0123456789FBIWRx -,\n", max_size=6))
def test_any_text_is_an_op_or_refused(text: str) -> None:
    try:
        op = Op.parse(text)
    except FormatError:
        return
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize("text", ["", "F", "2F", "F0", "2X0", "-1F0", "2F0x", "2F0,", "\u0663F0", "1" * 10 + "F0"])
def test_what_is_no_op_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(FormatError, match="write stage, one of F B I W R O L, and micro-batch, such as 2F0") as caught:
        Op.parse(text)
    assert repr(text) in str(caught.value)


def test_long_text_is_told_in_short() -> None:
    with pytest.raises(FormatError) as caught:
        Op.parse("x" * 10_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"stage": -1}, "stage -1 is negative; stages count from 0"),
        ({"ranks": (1, 1)}, "ranks (1, 1) must be one or more different ranks"),
        ({"ranks": (-1,)}, "ranks (-1,) must be one or more different ranks, counted from 0"),
        ({"duration_us": -1}, "duration_us of task 2F is -1: give a whole number of 0 or more"),
        ({"peak_bytes": -7}, "peak_bytes of task 2F is -7"),
        ({"held_bytes": 0.5}, "held_bytes of task 2F is 0.5"),
    ],
)
def test_a_task_refuses_what_makes_no_sense(changed: dict[str, object], told: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(told)):
        Task(**{"stage": 2, "kind": Kind.F, "ranks": (0,), "duration_us": 1, **changed})  # type: ignore[arg-type]


# --- placements by their pictures -------------------------------------------------------------------------------------


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ("v", [(0,), (1,), (2,), (3,)]),
        ("x", [(0,), (1,), (2,), (3,), (3,), (2,), (1,), (0,)]),
        ("m", [ALL, (0,), (1,), (2,), (3,)]),
        ("nn", [ALL, (0,), (1,), ALL, (2,), (3,)]),
        ("nn-eager", [ALL, (0,), ALL, (1,), (2,), (3,)]),
        ("k", [(0,), (1,), (2,), (3,), ALL]),
    ],
)
def test_ranks(shape: str, ranks: list[tuple[int, ...]]) -> None:
    assert [task.ranks for task in tessel(shape, 4).tasks if task.kind is Kind.F] == ranks


def test_branches_meet() -> None:
    """K's branches do not feed each other, only the shared stage."""
    assert tessel("k", 6).stage_edges == ((0, 1), (1, 2), (3, 4), (4, 5), (2, 6), (5, 6))


def test_errors() -> None:
    costs = Costs.uniform(4)
    with pytest.raises(PlacementError, match="m_shape needs 5 stages on its 4 ranks, not 4"):
        m_shape(costs, Cluster.uniform(4))
    with pytest.raises(PlacementError, match=r"even number of ranks.* not 3; use 4"):
        k_shape(costs, Cluster.uniform(3))
