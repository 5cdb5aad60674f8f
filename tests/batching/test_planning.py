"""Plans of batches: complete, within memory, timed right, the same every time, and no sample lost."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import rota
from batching.steps import chain, optimum_us
from rota import Cluster, Curve, Plan, SearchError, SharedLink, Size, SizeModel, place, plan_replicas
from rota.batching.bounds import of_any_sequence, of_grouping
from rota.batching.climbing import climb
from rota.batching.dispatching import by_policy, falling, valley
from rota.batching.figures import Layout
from rota.batching.grouping import Grouper, _split
from rota.batching.replaying import fits
from rota.batching.windows import sequence_bound_us
from support.recount import recount, step_end_times
from support.sampling import some


def model(num_stages: int, split: bool, seed: int = 0) -> SizeModel:
    """Stages that differ, small enough to be recounted µs by µs."""
    rng = np.random.default_rng(seed)

    def curves(constant: float, per_token: float, per_square: float) -> tuple[Curve, ...]:
        factors = rng.uniform(0.7, 1.3, (num_stages, 3)) * [constant, per_token, per_square]
        return tuple(Curve(*row) for row in factors.tolist())

    return SizeModel(
        forward_us=curves(2, 0.1, 0.002),
        backward_us=curves(3, 0.15, 0.003),
        weight_us=curves(2, 0.1, 0) if split else None,
        activation_bytes=curves(5, 10, 0.01),
        input_frees_bytes=curves(1, 4, 0.01) if split else None,
        boundary_bytes=curves(1, 2, 0)[1:],
        forward_peak_bytes=curves(3, 1, 0),
        backward_peak_bytes=curves(3, 2, 0),
        static_bytes=(100,) * num_stages,
        optimizer_us=(7,) * num_stages,
        reduce_us=(5,) * num_stages,
    )


@settings(max_examples=some(25))
@given(st.data())
def test_random_batches(data: st.DataObject) -> None:
    split, packed = data.draw(st.booleans()), data.draw(st.booleans())
    num_ranks = data.draw(st.integers(1, 4))
    place, per_rank = data.draw(st.sampled_from([(rota.place, 1), (rota.wave, 2)]))
    costs = model(num_ranks * per_rank, split, data.draw(st.integers(0, 9)))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=25))
    limit = data.draw(st.none() | st.integers(4_000, 20_000))
    cluster = Cluster.uniform(num_ranks, limit, data.draw(st.integers(0, 3)), data.draw(st.none() | st.integers(5, 9)))
    planned = rota.plan_batch(costs, cluster, lengths, packed=packed, place=place, tries=20)
    rota.check(planned.plan)
    counted = recount(planned.plan)
    ends = [end for *_, end in step_end_times(planned.plan, counted)]
    assert planned.makespan_us >= planned.bound_us
    assert planned.timeline.makespan_us == max(counted.makespan_us, *ends) == planned.makespan_us
    assert sorted(sample for group in planned.groups for sample in group) == [*range(len(lengths))]
    measure = Size.packed if packed else Size.padded
    assert planned.sizes == tuple(measure([lengths[i] for i in group]) for group in planned.groups)
    for m, size in enumerate(planned.sizes):
        placement = planned.plan.placement.for_microbatch(m)
        assert placement.tasks == place(costs.costs(size), cluster).tasks
    assert planned == rota.plan_batch(costs, cluster, lengths, packed=packed, place=place, tries=20)


def test_a_sample_that_fits_nowhere_is_refused_by_its_index() -> None:
    cluster = Cluster.uniform(2, 2_000)
    lengths = [10, 20, 300, 5]
    with pytest.raises(SearchError, match="sample 2 of length 300 fits in no micro-batch: alone it needs") as error:
        rota.plan_batch(model(2, False), cluster, lengths)
    need = int(str(error.value).split("needs ")[1].split()[0])
    assert rota.plan_batch(model(2, False), Cluster.uniform(2, 2 * need), lengths).groups
    with pytest.raises(SearchError, match="sample 2 of length 300 fits in no micro-batch") as error:
        rota.plan_replicas(model(2, False), cluster, lengths, 2)
    assert f"needs {need} bytes" in str(error.value)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_batches_without_samples_or_tokens_are_refused(lengths: list[int]) -> None:
    with pytest.raises(SearchError, match="lengths"):
        rota.plan_batch(model(2, False), Cluster.uniform(2), lengths)


def test_placements_that_are_not_supported_are_refused() -> None:
    with pytest.raises(SearchError, match="2 data streams"):
        rota.plan_batch(model(2, False), Cluster.uniform(2), [3], place=rota.bidirectional)
    with pytest.raises(SearchError, match="on 2 ranks"):
        rota.plan_batch(model(1, False), Cluster.uniform(2), [3], place=lambda c, k: rota.place(c, k, [(0, 1)]))
    with pytest.raises(SearchError, match="shared links"):
        rota.plan_batch(model(2, False), Cluster((None, None), shared=(SharedLink("host", 1, (0,), (1,)),)), [3])


@pytest.mark.parametrize("time_limit_s", [0.0, 0.05])
def test_a_plan_is_there_when_the_time_is_over(time_limit_s: float) -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 200).tolist()
    planned = rota.plan_batch(model(3, True), Cluster.uniform(3, 20_000, 2), lengths, time_limit_s=time_limit_s)
    rota.check(planned.plan)
    assert planned.bound_us <= planned.makespan_us == planned.timeline.makespan_us
    with pytest.raises(SearchError, match="time_limit_s"):
        rota.plan_batch(model(3, True), Cluster.uniform(3), lengths, time_limit_s=-1)


def test_a_few_giants_and_little_memory() -> None:
    """Rules rate a grouping far too low here; list scheduling of groups filled up in falling order is better."""
    lengths = np.clip(np.random.default_rng(179).lognormal(5.0, 1.2, 1_500), 8, 8_192).astype(int).tolist()
    stage = Curve(60, 0.02, 4e-6)
    stages = SizeModel((stage,) * 8, (stage,) * 8, (stage,) * 8, activation_bytes=(Curve(0, 1_000),) * 8)
    cluster = Cluster.uniform(8, 8 * 6_144_000)
    layout = Layout.of(stages, cluster, rota.place)
    groups: list[list[int]] = [[]]
    for length in sorted(lengths, reverse=True):
        if groups[-1] and (len(groups[-1]) + 1) * groups[-1][0] > 6_144:
            groups.append([])
        groups[-1].append(length)
    filled = layout.problem([*map(Size.padded, groups)])
    simple = by_policy(filled, falling(filled))
    assert rota.plan_batch(stages, cluster, lengths).makespan_us <= simple.makespan_us


def test_replicas_get_batches_of_about_the_same_time() -> None:
    lengths = np.random.default_rng(0).integers(5, 200, 400).tolist()
    costs = model(3, True)
    plans = rota.plan_replicas(costs, Cluster.uniform(3, 100_000), lengths, 4, tries=20)
    assert sorted(i for plan in plans for group in plan.groups for i in group) == [*range(400)]
    spans = [plan.makespan_us for plan in plans]
    assert max(spans) <= 1.05 * min(spans)
    for plan in plans:
        assert plan.sizes == tuple(Size.padded([lengths[i] for i in group]) for group in plan.groups)
    with pytest.raises(SearchError, match="at least one"):
        rota.plan_replicas(costs, Cluster.uniform(3), [5], 2)


# --- the planner's process by itself: a model in, plans out -----------------------------------------------------------


def test_it_answers_as_plan_replicas_and_a_refusal_as_an_error() -> None:
    costs, cluster, lengths = model(2, False), Cluster.uniform(2, 9_000), [5, 9, 30, 12, 8, 7]
    first = {"function": None, "options": {"model": costs.to_json(), "cluster": cluster.to_json(), "tries": 20}}
    requests = [first, {"lengths": lengths, "num_replicas": 2}, {"lengths": lengths, "num_replicas": 9}]
    lines = "".join(f"{json.dumps(request)}\n" for request in requests)
    command = [sys.executable, "-m", "rota.plan_server"]
    out = subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout.splitlines()
    answer, refusal = map(json.loads, out)
    expected = plan_replicas(costs, cluster, lengths, 2, tries=20)
    assert [Plan.from_json(replica["plan"]) for replica in answer["replicas"]] == [plan.plan for plan in expected]
    assert "give each replica at least one" in refusal["error"]


# --- groups are those that take the least time in all, of all that may be ---------------------------------------------


LIMIT_BYTES = 100_000  # of each rank, without what is static


def least_us(sorted_lengths: list[int], curve: Curve, packed: bool, room_bytes: float, limit_us: float) -> float:
    """The least time of all groups of neighbours, by trying every begin of the last group."""
    measure = Size.packed if packed else Size.padded
    least = [0.0]
    for end in range(1, len(sorted_lengths) + 1):
        totals = []
        for begin in range(end):
            size = measure(sorted_lengths[begin:end])
            if end - begin == 1 or (curve.at(size) <= limit_us and 10 * size.tokens <= room_bytes):
                totals.append(least[begin] + curve.at(size))
        least.append(min(totals))
    return least[-1]


@settings(max_examples=some(40))
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40),
    st.booleans(),
    st.floats(1.0, 12.0),
    st.sampled_from([np.inf, 200.0, 20.0]),
)
def test_groups_take_the_least_time(lengths: list[int], packed: bool, num_in_flight: float, limit_us: float) -> None:
    curve = Curve(10, 0.05, 1e-3)
    model = SizeModel((curve,) * 2, (Curve(0),) * 2, activation_bytes=(Curve(0, 10),) * 2, boundary_bytes=(Curve(0),))
    layout = Layout.of(model, Cluster.uniform(2, LIMIT_BYTES), place)
    grouper = Grouper(layout, lengths, packed)
    starts = _split(grouper._groups(float(limit_us), num_in_flight))
    room_bytes = (LIMIT_BYTES - 2 * len(layout.sorted_tasks)) / num_in_flight
    expected_us = least_us(sorted(lengths, reverse=True), curve, packed, room_bytes, limit_us)
    sizes = grouper.sizes(starts)
    assert np.isclose(sum(curve.at(size) for size in sizes), expected_us)
    groups = grouper.samples(starts)
    assert sorted(sample for group in groups for sample in group) == [*range(len(lengths))]
    measure = Size.packed if packed else Size.padded
    assert [*sizes] == [measure([lengths[i] for i in group]) for group in groups]


# --- no bound is above the optimum of the plans that it is about, and plans are close to it ---------------------------


FEW = [(seed, ranks, 4, split, flight, giants) for seed, ranks, split, flight, giants in (
    (0, 2, False, 2.0, 0), (1, 3, False, 3.0, 0), (2, 3, False, 2.2, 1), (3, 3, True, 3.0, 0), (4, 2, True, 2.0, 1),
    (5, 3, True, 2.4, 0),
)]  # fmt: skip
MANY = [
    (seed, 2 + seed % 3, 4 + seed % 4, bool(seed % 2), 1.5 + seed % 5 / 2, seed % 3) for seed in range(100, 160)
]  # fmt: skip
CASES = [*FEW, *(pytest.param(*case, marks=pytest.mark.sweep) for case in MANY)]
NAMES = ("seed", "ranks", "count", "split", "in_flight", "giants")


@pytest.mark.parametrize(NAMES, CASES)
def test_bounds_of_a_grouping_and_of_a_sequence(
    seed: int, ranks: int, count: int, split: bool, in_flight: float, giants: int
) -> None:
    problem = chain(seed, ranks, count, split, in_flight, giants)
    best_us = optimum_us(problem)
    if best_us is None:
        pytest.skip("CP-SAT did not close it")
    highest_us = max(bound.us for bound in of_grouping(problem))
    assert highest_us <= best_us
    for sequence in (valley(problem), np.random.default_rng(seed).permutation(count)):
        exact_us = optimum_us(problem, sequence.tolist())
        if exact_us is None:
            continue
        assert best_us <= exact_us
        for lowest_us in (0, highest_us):
            assert sequence_bound_us(problem, sequence, lowest_us, exact_us) <= exact_us
            assert sequence_bound_us(problem, sequence, lowest_us, exact_us + 7) <= exact_us
            assert sequence_bound_us(problem, sequence, lowest_us, 2 * exact_us) <= exact_us
        assert max((bound.us for bound in of_any_sequence(problem)), default=0) <= exact_us


def test_a_giant_that_fills_the_memory_makes_its_rank_wait() -> None:
    problem = chain(0, 3, 4, False, 1.0, giants=1)
    assert max(b.us for b in of_any_sequence(problem)) > max(b.us for b in of_grouping(problem) if "work" in b.why)


@pytest.mark.parametrize("seed", range(6))
def test_local_search_never_makes_a_step_longer(seed: int) -> None:
    problem = chain(seed, 3, 9, bool(seed % 2), 2.5, giants=seed % 3)
    sequence = np.random.default_rng(seed).permutation(9)
    first = by_policy(problem, sequence)
    last_us = first.makespan_us
    for tries in (10, 100, 1_000):
        climbed, timed = climb(problem, sequence, first, 0, tries)
        assert sorted(climbed.tolist()) == [*range(9)]
        assert fits(problem.tables, problem.limits_bytes, climbed, timed.orders, -1)
        assert timed.makespan_us <= last_us
        last_us = timed.makespan_us
    assert climb(problem, sequence, first, 0, 1_000, is_over=lambda: True)[1].makespan_us == first.makespan_us


def test_the_bound_of_a_sequence_is_close_to_its_optimum() -> None:
    far = []
    for case in FEW:
        problem = chain(*case)
        exact_us = optimum_us(problem, valley(problem).tolist())
        far.append(1 - sequence_bound_us(problem, valley(problem), 0, exact_us) / exact_us)
    assert np.mean(far) <= 0.02, far
