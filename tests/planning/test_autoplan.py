"""autoplan: never worse than a named schedule on equal layers, bounds that hold, and what it says."""

import math
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from operator import le

import pytest
from hypothesis import given, settings, strategies as st

import rota
from rota import AllReduceTimes, Cluster, Kind, LayerCosts, Link, check, simulate
from rota.core.errors import PlacementError, RotaError, SearchError
from rota.cutting import uniform
from rota.planning import Choices, Machine, Progress, autoplan, sweep
from rota.planning.choosing import Contender
from rota.planning.evaluation import Misfit, evaluate
from rota.planning.layout_bounds import layout_bound_us, least_bytes, placement_bound_us
from rota.planning.layouts import Candidate, Layout, cuts, layouts
from rota.planning.plan_text import parts_of, why_slower
from rota.planning.request import Request
from rota.schedules import FAMILIES, NAMED
from support.sampling import some

LONG_S = 10_000  # no test waits for the clock


def layer_costs(
    rows: int = 1,
    forward_us: tuple[int, ...] = (10,) * 8,
    *,
    kept: int = 8,
    parameters: int = 0,
    boundary: int = 0,
    edges: tuple[tuple[int, int], ...] | None = None,
    backward_factor: int = 2,
) -> LayerCosts:
    """A chain, I and W each half of B, kept bytes and parameters the same for all layers."""
    n = len(forward_us)
    edges = tuple((i, i + 1) for i in range(n - 1)) if edges is None else edges
    f = tuple(us * rows for us in forward_us)
    b = tuple(us * backward_factor for us in f)
    half = tuple(us // 2 for us in b)
    none, sent, zeros = (0,) * n, (boundary * rows,) * len(edges), (0,) * len(edges)
    return LayerCosts(
        rows=rows,
        cuts=tuple(f"cuts[{i}]" for i in range(n - 1)),
        forward_us=f,
        backward_us=b,
        input_us=half,
        weight_us=tuple(x - y for x, y in zip(b, half, strict=True)),
        recompute_us=f,
        optimizer_us=(parameters // 4,) * n,
        kept_bytes=(kept * rows,) * n,
        waiting_bytes=(kept * rows // 2,) * n,
        forward_peak_bytes=none,
        backward_peak_bytes=none,
        input_peak_bytes=none,
        weight_peak_bytes=none,
        parameter_bytes=(parameters,) * n,
        gradient_bytes=(parameters,) * n,
        buffer_bytes=none,
        optimizer_bytes=none,
        edges=edges,
        boundary_bytes=sent,
        boundary_gradient_bytes=sent,
        received_bytes=zeros,
    )


@st.composite
def questions(draw: st.DrawFn) -> Request:
    num_layers = draw(st.integers(1, 6))
    forward = tuple(draw(st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers)))
    sizes = {
        "kept": draw(st.integers(0, 6)),
        "parameters": draw(st.sampled_from([0, 3, 40])),
        "boundary": draw(st.integers(0, 5)),
        "backward_factor": draw(st.integers(0, 3)),
    }
    profiles = {rows: layer_costs(rows, forward, **sizes) for rows in draw(st.sampled_from([(1,), (1, 2), (2, 3)]))}
    num_ranks = draw(st.integers(1, 4))
    limit = draw(st.sampled_from([None, 10**6, 60, 150]))
    slowdowns = draw(st.sampled_from([(), tuple(1 + 0.25 * (rank % 2) for rank in range(num_ranks))]))
    links = {"ranks_per_node": 2, "node_link": Link(3, 1)} if draw(st.booleans()) else {}
    machine = Machine(num_ranks, limit, Link(draw(st.integers(0, 2)), 2), **links, slowdowns=slowdowns)
    return Request(profiles, machine, draw(st.sampled_from([2, 6, 12])), Choices(inference=draw(st.booleans())))


def brute_force(request: Request) -> Iterator[tuple[Layout, Candidate, rota.Plan]]:
    """Every named schedule on equal layers, for all layouts, in the memory or not."""
    for rows, layers in request.profiles.items():
        for layout in layouts(request, rows):
            boundaries = tuple(uniform(layers.num_layers, layout.num_stages))
            for family in FAMILIES:
                if request.choices.inference != (family.name == "forward_only"):
                    continue
                again = frozenset(layout.recomputed)
                candidate = Candidate(request, layout, boundaries, family.backward == "split", again)
                try:
                    plan = family(candidate.placement, layout.num_microbatches)
                    assert plan.nodes
                except RotaError:
                    continue
                yield layout, candidate, plan


def fits(plan: rota.Plan) -> bool:
    peaks, limits = simulate(plan).peak_memory_bytes, plan.placement.cluster.limit_bytes
    return all(limit is None or peak <= limit for peak, limit in zip(peaks, limits, strict=True))


@settings(max_examples=some(20))
@given(questions())
def test_never_worse_than_a_named_schedule_on_equal_layers(request: Request) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "can_search", lambda: False)  # by what it proves, not by what it searches
        best_us = min((simulate(plan).makespan_us for *_, plan in brute_force(request) if fits(plan)), default=math.inf)
        try:
            given = request.profiles, request.machine, request.batch_rows
            answer = autoplan(*given, request.choices, time_limit_s=LONG_S)
        except SearchError:
            assert best_us == math.inf
            return
    check(answer.plan)
    assert not answer.ran_out
    assert answer.bound_us <= answer.best.makespan_us <= best_us
    assert answer.best.makespan_us == simulate(answer.plan).makespan_us


@settings(max_examples=some(20))
@given(questions())
def test_no_plan_beats_a_bound(request: Request) -> None:
    for layout, candidate, plan in brute_force(request):
        timeline = simulate(plan)
        of_placement = placement_bound_us(candidate.placement, layout.num_microbatches)
        assert layout_bound_us(request, layout) <= timeline.makespan_us
        assert of_placement <= timeline.makespan_us
        held = zip(least_bytes(candidate.placement), timeline.peak_memory_bytes, strict=True)
        assert all(least <= peak for least, peak in held)
        if layout.recompute == "none" and not request.choices.inference:
            again = candidate.recomputing(range(layout.num_stages))
            either = least_bytes(candidate.placement, again.placement)
            some = candidate.recomputing(range(layout.num_stages // 2))
            for one in (candidate, again, some):
                assert all(map(le, either, least_bytes(one.placement)))


UNEVEN = (2, 10, 10, 10, 10, 10, 10, 25)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named schedules will do, and take no time to be searched."""
    monkeypatch.setattr(sweep, "can_search", lambda: False)


@pytest.mark.usefixtures("named")
def test_as_little_is_recomputed_as_lets_it_fit() -> None:
    layers, layout = layer_costs(1, kept=20), Layout(4, 1, 1, 8)

    def evaluated(limit: int) -> Contender | Misfit | None:
        request = Request({1: layers}, Machine(4, limit), 8)
        return evaluate(Candidate(request, layout, (0, 2, 4, 6, 8)), NAMED["1f1b"], math.inf)

    free, over = evaluated(160), evaluated(59)
    assert free.peak_bytes == 160  # four micro-batches of two layers on the first rank
    assert isinstance(over, Misfit)  # what R makes, and what a layer keeps on top while it runs
    assert (over.num_bytes, over.over_bytes) == (60, 1)
    tight = evaluated(159)
    assert tight.candidate.recomputed == {0}
    assert tight.peak_bytes <= 159
    assert tight.makespan_us > free.makespan_us
    without = Request({1: layers}, Machine(4, 159), 8, Choices(recompute=False))
    assert isinstance(evaluate(Candidate(without, layout, (0, 2, 4, 6, 8)), NAMED["1f1b"], math.inf), Misfit)
    answer = autoplan({1: layers}, Machine(4, 159), 8, Choices(recompute=False), time_limit_s=30)
    assert not any(found.candidate.recomputed for found in answer.candidates)


@pytest.mark.usefixtures("named")
def test_stages_are_on_two_ranks_only_where_it_is_wanted_and_their_sums_have_a_price() -> None:
    def shapes(machine: Machine, copies: bool = True) -> set[str]:
        request = Request({1: layer_costs()}, machine, 8, Choices(copies=copies))
        return {layout.shape for layout in layouts(request, 1)}

    assert "bidirectional" in shapes(Machine(2, None, Link(1, 100)))
    assert "bidirectional" in shapes(Machine(2, None, Cluster.uniform(2, bytes_per_us=100)))
    assert "bidirectional" not in shapes(Machine(2, None, Cluster.uniform(2)))  # a cluster without a rate
    assert "bidirectional" not in shapes(Machine(2)) | shapes(Machine(2, None, Link(1, 100)), copies=False)
    layers = {1: layer_costs(1, parameters=8)}
    machine = Machine(2, None, Link(1, 100))
    answer = autoplan(layers, machine, 8, Choices(pipeline_ranks=2), time_limit_s=LONG_S)
    assert "bidirectional" not in {found.candidate.layout.shape for found in answer.candidates}
    assert "weights" not in answer.to_text()
    asked = autoplan(layers, machine, 8, Choices(pipeline_ranks=2, copies=True), time_limit_s=LONG_S)
    both_ways = next(found for found in asked.candidates if found.candidate.layout.has_copies)
    text = replace(asked, candidates=(both_ways,)).to_text()
    assert (
        "every stage is on two ranks and all weights are held twice; the charts number the second copies 2 to 3" in text
    )
    assert "stages x 2: bidirectional, every stage is on two ranks, so all weights are held twice" in text
    assert " 2 x 2 " in text
    assert both_ways.plan.num_stages == 2


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("inference", [False, True])
def test_nothing_fits_and_what_would(inference: bool) -> None:
    profiles = {rows: layer_costs(rows, parameters=1000) for rows in (1, 2)}
    with pytest.raises(
        SearchError,
        match=r"found nothing that fits: the plan that needs the least memory is .* of 1 row, .*; give --memory",
    ) as error:
        autoplan(profiles, Machine(2, 1200), 8, Choices(inference=inference), time_limit_s=LONG_S)
    found = re.search(r"--memory ([\d.]+)kB", str(error.value))
    enough = round(float(found[1]) * 1000)
    answer = autoplan(profiles, Machine(2, enough), 8, Choices(inference=inference), time_limit_s=LONG_S)
    assert answer.best.peak_bytes <= enough


@pytest.mark.usefixtures("named")
def test_the_parts_of_a_step_add_up_and_reasons_name_what_is_longer() -> None:
    profiles = {rows: layer_costs(rows, UNEVEN, parameters=8) for rows in (1, 2)}
    answer = autoplan(profiles, Machine(4, None, Link(1, 4)), 16, Choices(copies=True), time_limit_s=LONG_S)
    for found in answer.candidates:
        assert sum(parts_of(found)) == pytest.approx(found.makespan_us)
        assert found.makespan_us >= found.bound_us
    text = answer.to_text()
    assert f"of {answer.counts.layouts:,}" in text or f"{answer.counts.layouts:,} layouts" in text
    assert "1F1B with equal layers: +" in text
    slower = answer.candidates[1:4]
    assert slower
    for found in slower:
        message = why_slower(found, answer.best)
        assert message in text
        assert any(word in message for word in ("ranks wait", "compute", "recomputes", "all-reduce", "equally fast"))


def test_the_answer_is_the_same_on_every_run() -> None:
    profiles = {rows: layer_costs(rows, UNEVEN, kept=9, parameters=20) for rows in (1, 2)}
    first, second = (autoplan(profiles, Machine(4, 300), 12, time_limit_s=LONG_S) for _ in range(2))
    assert not first.ran_out
    assert first.plan == second.plan
    assert first.candidates == second.candidates


@pytest.mark.usefixtures("named")
def test_a_slow_rank_gets_fewer_layers_and_slow_replicas_hold_up_the_others() -> None:
    layers = layer_costs(1, (10,) * 12, parameters=10**6)
    machine = Machine(3, 13 * 10**6, slowdowns=(1, 1, 2))
    best = autoplan({1: layers}, machine, 24, time_limit_s=LONG_S).best.candidate
    assert best.layout.num_ranks == 3
    layers_on = [0, 0, 0]
    for stage, rank in enumerate(best.layout.ranks):
        layers_on[rank] += best.boundaries[stage + 1] - best.boundaries[stage]
    assert layers_on[2] < min(layers_on[:2])
    assert Machine(4, None, slowdowns=(1, 1, 1, 3)).slowdowns_of(2, 2) == (1, 3)


@pytest.mark.usefixtures("named")
def test_replicas_are_offered_only_where_their_all_reduces_have_a_price() -> None:
    profiles = {1: layer_costs(1, parameters=8)}

    def replicas(machine: Machine) -> set[int]:
        found = autoplan(profiles, machine, 8, time_limit_s=LONG_S)
        assert ("Replicas are not considered" in found.to_text()) == (not machine.prices_sums)
        return {one.candidate.layout.num_replicas for one in found.candidates}

    free = autoplan(profiles, Machine(4), 8, time_limit_s=LONG_S)
    assert free.to_text().startswith("Transfers are counted as free; give --link or --links")
    assert replicas(Machine(4)) == replicas(Machine(4, None, Link(3))) == {1}
    assert replicas(Machine(4, None, Link(1, 100))) > {1}
    times = (AllReduceTimes(2, ((4, 5), (64, 9))), AllReduceTimes(4, ((4, 20),)))
    measured = Machine(4, None, Cluster((None,) * 4, all_reduces=times))
    assert replicas(measured) > {1}
    assert measured.reduce_us(4, [0, 1]) == measured.reduce_us(1, [0, 1]) == 5
    assert measured.reduce_us(34, [0, 1]) == 7  # halfway between the two
    assert measured.reduce_us(128, [0, 1]) == 18  # at the rate of the largest
    assert measured.reduce_us(4, [0, 1, 2]) == 20  # as of 4
    nothing_to_sum = autoplan({1: layer_costs(1)}, Machine(4), 8, time_limit_s=LONG_S)
    assert "Replicas are not considered" not in nothing_to_sum.to_text()


def test_replicas_hold_their_gradients_and_the_sums_of_these() -> None:
    layers = replace(layer_costs(1, (10,) * 4, kept=0), parameter_bytes=(1,) * 4, gradient_bytes=(30, 10, 10, 10))
    request = Request({1: layers}, Machine(4, 75, Link(0, 10)), 4)
    shares = {layout.division: layout for layout in layouts(request, 1) if layout.shape == "chain"}
    for division, buffers in (((2, 1), 0), ((2, 2), 1)):
        candidate = Candidate(request, shares[division], (0, 1, 4))
        assert candidate.placement.static_bytes == (1 + 30 * (1 + buffers), 3 + 30 * (1 + buffers))
        # Equal stages fit only where nothing is summed: layers 0 and 1 have 40 bytes of gradients.
        assert ((0, 1, 4) in cuts(layers, shares[division], request.machine)) == bool(buffers)


@pytest.mark.usefixtures("named")
def test_no_backward_is_split_if_it_must_be_whole() -> None:
    profiles, machine = {1: layer_costs(1, UNEVEN, parameters=8)}, Machine(4, None, Link(1, 100))
    either = autoplan(profiles, machine, 16, Choices(pipeline_ranks=4), time_limit_s=LONG_S)
    whole = autoplan(profiles, machine, 16, Choices(pipeline_ranks=4, split_backward=False), time_limit_s=LONG_S)
    assert Kind.W in {task.kind for task in either.plan.placement.tasks}
    for found in whole.candidates:
        kinds = {task.kind for task in found.plan.placement.tasks}
        assert Kind.B in kinds
        assert not kinds & {Kind.I, Kind.W}
    assert either.plan.num_ranks == whole.plan.num_ranks == 4
    assert either.best.makespan_us <= whole.best.makespan_us


@pytest.mark.usefixtures("named")
def test_a_plan_that_is_as_fast_with_less_memory_is_kept_beside_a_faster_one_of_its_kind() -> None:
    """1F1B and eager 1F1B are alike but for memory: the one faster by less than the profile's spread is not better."""
    layers = layer_costs(1, (500,) * 4, kept=100, boundary=100)
    machine = Machine(4, 1000, Link(5, 100))  # too little memory for GPipe
    choices = Choices(pipeline_ranks=4, split_backward=False, recompute=False)

    def best(tolerance: float) -> Contender:
        return autoplan({1: replace(layers, spread=(tolerance,) * 4)}, machine, 32, choices, time_limit_s=LONG_S).best

    fastest, near = best(0.0), best(0.036)
    assert fastest.schedule == "eager_1f1b"
    assert near.schedule == "1f1b"
    assert near.peak_bytes < fastest.peak_bytes
    assert fastest.makespan_us < near.makespan_us <= 1.036 * fastest.makespan_us


def test_estimates_are_said_to_be_estimates() -> None:
    layers = replace(layer_costs(1), note="estimated for h100")
    answer = autoplan({1: layers}, Machine(2, None, Link(1, 100)), 8, time_limit_s=LONG_S)
    lines = answer.to_text().splitlines()
    assert lines[0].startswith("Best plan (")
    verdict = [
        line.split()[0] for line in lines[: lines.index("All times are estimated for h100; nothing was measured")]
    ]
    assert verdict == ["Best", "vs.", "memory", "not"]
    plan = rota.Plan.from_json(answer.plan.to_json())
    assert "are estimated for h100; nothing" in rota.explain(plan).to_text()
    measured = autoplan({1: layer_costs(1)}, Machine(2, None, Link(1, 100)), 8, time_limit_s=LONG_S)
    assert "estimate" not in measured.to_text() + rota.explain(measured.plan).to_text()


def test_links_and_limits_are_the_worst_of_all_replicas() -> None:
    machine = Machine(6, (9, 8, 7, 6, 5, None), Link(1, 10), 4, Link(5, 2))
    cluster = machine.cluster(3, 2)
    assert cluster.limit_bytes == (6, 5, 7)
    assert cluster.link_between(0, 1) == Link(5, 2)  # processes 3 and 4 of the second replica
    assert cluster.link_between(1, 2) == Link(1, 10)
    assert machine.reduce_us(100, [0, 1, 2, 3]) == 2 * 3 * (1 + 3)  # four parts of 25 bytes, 3 µs each
    assert machine.reduce_us(100, [0, 5]) == 2 * (5 + 25)
    assert machine.reduce_us(100, [3]) == machine.reduce_us(0, [0, 1]) == 0
    measured = Cluster((None,) * 6, Link(1, 10), ((4, 3, Link(5, 2)), (0, 1, Link(1, 7)), (3, 4, Link(4, 8))))
    machine = Machine(6, None, measured)
    cluster = machine.cluster(3, 2)
    assert cluster.link_between(0, 1) == Link(4, 7)  # 0 to 1, and 3 to 4 of the second replica
    assert cluster.link_between(1, 0) == Link(5, 2)
    assert cluster.link_between(1, 2) == Link(1, 10)
    assert machine.reduce_us(100, [3, 4]) == 2 * (5 + 25)
    assert machine.reduce_us(100, [0, 2]) == 2 * (1 + 5)
    assert Machine(2, None, Cluster((9, None, 7))).limits == (9, None)


def test_branches_are_placed_as_the_graph_that_they_are() -> None:
    edges = ((0, 1), (0, 3), (1, 2), (3, 4), (2, 5), (4, 5))
    layers = layer_costs(1, (4, 9, 9, 9, 9, 4), edges=edges, boundary=1)
    answer = autoplan({1: layers}, Machine(3, None, Link(1, 1)), 6, time_limit_s=LONG_S)
    check(answer.plan)
    assert {found.candidate.layout.shape for found in answer.candidates} == {"chain"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_rows": 7}, "batch_rows is 7: give a multiple of one of the rows that were measured, 2, 4"),
        ({"profiles": {}}, "give profiles as a dict of layers by rows"),
        ({"profiles": {3: layer_costs(1)}}, r"profiles\[3\] was measured with 1 row .*; give it as profiles\[1\]"),
        ({"choices": Choices(pipeline_ranks=3)}, "a pipeline of 3 ranks: give 1 to 2"),
    ],
)
def test_what_cannot_be_asked(change: dict[str, object], message: str) -> None:
    request = {"profiles": {2: layer_costs(2), 4: layer_costs(4)}, "machine": Machine(2), "batch_rows": 8}
    with pytest.raises(RotaError, match=message):
        autoplan(**(request | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_ranks": 1, "slowdowns": (0,)}, r"slowdowns\[0\] is 0: give 1 for ordinary speed"),
        ({"num_ranks": 2, "node_link": Link(1)}, "node_link joins nodes: give the number of ranks of a node"),
        ({"num_ranks": 3, "link": Cluster.uniform(2)}, "link is a cluster of 2 ranks for 3; measure"),
        ({"num_ranks": 2, "link": Cluster.uniform(2), "ranks_per_node": 1}, "a cluster has the links of all pairs"),
        ({"num_ranks": 2, "link": Cluster.uniform(2, 9), "limit_bytes": 8}, "the cluster has limit_bytes too"),
    ],
)
def test_machines_that_there_are_not(given: dict[str, object], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Machine(**given)  # type: ignore[arg-type]


def test_it_can_be_stopped_and_says_what_was_left() -> None:
    profiles = {1: layer_costs(1, UNEVEN), 2: layer_costs(2, UNEVEN)}
    lines: list[str] = []
    stopped: list[bool] = []

    def stop_at_the_first_plan(progress: Progress) -> None:
        lines.append(str(progress))
        if progress.best_us is not None and not stopped:
            stopped.append(True)
            signal.raise_signal(signal.SIGINT)

    answer = autoplan(profiles, Machine(4, 40), 16, time_limit_s=LONG_S, progress=stop_at_the_first_plan)
    assert answer.stopped_by == "Ctrl-C"
    assert "stopped by Ctrl-C" in answer.to_text()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert any("plans" in line for line in lines)


def test_an_error_of_progress_loses_no_plan() -> None:
    def fails(progress: Progress) -> None:
        if progress.best_us is not None:
            raise ValueError("the screen is gone")

    profiles = {1: layer_costs(1, UNEVEN), 2: layer_costs(2, UNEVEN)}
    with pytest.warns(RuntimeWarning, match="the screen is gone"):
        answer = autoplan(profiles, Machine(4, 40), 16, time_limit_s=LONG_S, progress=fails)
    check(answer.plan)
    assert "stopped by ValueError in progress: the screen is gone" in answer.to_text()


def test_what_was_not_looked_at_is_not_said_not_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.planning.request.Deadline.left_s", property(lambda deadline: 0.0))
    with pytest.raises(SearchError, match=r"found no plan|layouts not examined: give a longer --time-limit"):
        autoplan({1: layer_costs(1, kept=20)}, Machine(4, 30), 8, time_limit_s=1)


def test_a_search_that_would_compile_itself_for_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "can_search", lambda: True)
    monkeypatch.setattr(sweep, "_compiling_s", lambda: 2.0 * LONG_S)
    answer = autoplan({1: layer_costs(1, UNEVEN)}, Machine(4, 40), 16, time_limit_s=LONG_S)
    assert answer.ran_out
    (remark,) = answer.remarks
    assert "the first search for them compiles itself, in about 20000 s: give a longer --time-limit" in remark
    assert remark in answer.to_text()
