"""Plans of batches: complete, within memory, timed right, the same every time, and no sample lost."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import rota
from rota import Cluster, Curve, SearchError, SharedLink, Size, SizeModel
from rota.batching.dispatching import by_policy, falling
from rota.batching.figures import Layout
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
    assert simple is not None
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
