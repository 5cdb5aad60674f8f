"""`cut` against all cuts there are: ranks with several stages, limits, slow ranks, recomputation."""

from fractions import Fraction
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st

from rota import Cluster, Kind, LayerCosts, SplitError, place
from rota.cutting import Cut, cut
from support.sampling import some


@st.composite
def layers(draw: st.DrawFn, least: int = 2, most: int = 8) -> LayerCosts:
    """A chain with skips, storages that layers share, and any times, bytes and peaks."""
    n = draw(st.integers(least, most))
    times, sizes = st.tuples(*[st.integers(0, 9)] * n), st.tuples(*[st.integers(0, 5)] * n)
    pairs = [(a, b) for b in range(n) for a in range(b)]
    skips = draw(st.lists(st.sampled_from(pairs), max_size=3)) if pairs else []
    edges = [*((i, i + 1) for i in range(n - 1)), *skips]
    by_edge = st.tuples(*[st.integers(0, 4)] * len(edges))
    shared = draw(st.sets(st.integers(1, n - 1), max_size=2)) if n > 1 else set()
    columns = {name: draw(times) for name in ("forward_us", "backward_us", "input_us", "weight_us", "recompute_us")}
    columns |= {
        name: draw(sizes)
        for name in (
            *("kept_bytes", "waiting_bytes", "forward_peak_bytes", "backward_peak_bytes", "input_peak_bytes"),
            *("weight_peak_bytes", "parameter_bytes", "gradient_bytes", "buffer_bytes", "optimizer_bytes"),
        )
    }
    return LayerCosts(
        rows=1,
        cuts=tuple(f"cut{i}" for i in range(n - 1)),
        optimizer_us=(0,) * n,
        edges=tuple(edges),
        boundary_bytes=draw(by_edge),
        boundary_gradient_bytes=tuple(size + 1 for size in draw(by_edge)),
        received_bytes=draw(by_edge),
        changed_bytes=draw(sizes),
        **{
            name: tuple((b - 1, b, draw(st.integers(0, min(columns[of][b - 1 : b + 1])))) for b in sorted(shared))
            for name, of in (("shared", "kept_bytes"), ("waiting_shared", "waiting_bytes"), ("tied", "parameter_bytes"))
        },
        **columns,  # type: ignore[arg-type]
    )


def chain_of(times: list[int], kept: int = 0) -> LayerCosts:
    """F and B of each layer together take `times`."""
    n = len(times)
    zeros: dict[str, Any] = dict.fromkeys(
        (
            *("recompute_us", "optimizer_us", "waiting_bytes", "forward_peak_bytes", "backward_peak_bytes"),
            *("weight_us", "input_peak_bytes", "weight_peak_bytes", "gradient_bytes"),
            *("buffer_bytes", "optimizer_bytes"),
        ),
        (0,) * n,
    )
    zeros |= dict.fromkeys(("boundary_bytes", "boundary_gradient_bytes", "received_bytes"), (0,) * (n - 1))
    backward = tuple(time - time // 3 for time in times)
    return LayerCosts(
        rows=1,
        cuts=tuple(f"cut{i}" for i in range(n - 1)),
        forward_us=tuple(time // 3 for time in times),
        backward_us=backward,
        input_us=backward,
        kept_bytes=(kept,) * n,
        parameter_bytes=(1,) * n,
        edges=tuple((i, i + 1) for i in range(n - 1)),
        **zeros,
    )


def placed(num_ranks: int, stages_per_rank: int, is_wave: bool = False) -> list[int]:
    """The rank of each stage, as `interleaved` and `wave` place them."""
    down = [*range(num_ranks)]
    return [rank for i in range(stages_per_rank) for rank in (down[::-1] if is_wave and i % 2 else down)]


@st.composite
def questions(draw: st.DrawFn) -> tuple[LayerCosts, dict[str, Any]]:
    layer_costs = draw(layers())
    shapes = [shape for shape in ((1, False), (2, False), (3, False), (2, True)) if layer_costs.num_layers >= shape[0]]
    stages_per_rank, is_wave = draw(st.sampled_from(shapes))
    num_ranks = draw(st.integers(1, layer_costs.num_layers // stages_per_rank))
    stages = num_ranks * stages_per_rank
    limits = st.none() | st.integers(0, 80) | st.tuples(*[st.none() | st.integers(0, 60)] * num_ranks)
    return layer_costs, {
        "ranks": placed(num_ranks, stages_per_rank, is_wave),
        "limit_bytes": draw(limits),
        "in_flight": draw(st.none() | st.tuples(*[st.integers(0, 3)] * stages)),
        "slowdowns": draw(st.none() | st.tuples(*[st.sampled_from([0.5, 1, 1.1, 3])] * num_ranks)),
        "recompute": draw(st.sets(st.integers(0, stages - 1))),
    }


def weighed(layer_costs: LayerCosts, boundaries: list[int], options: dict[str, Any]) -> tuple[list[Fraction], bool]:
    """Each rank's time, and whether all fit, by way of the costs and the placement that a plan would have."""
    recompute, ranks = options["recompute"], options["ranks"]
    num_ranks = max(ranks) + 1
    costs = layer_costs.stages(boundaries, recompute=recompute)
    placement = place(costs, Cluster.uniform(num_ranks), [(rank,) for rank in ranks])
    times = [Fraction(0)] * num_ranks
    always, on_top = list(placement.static_bytes), [0] * num_ranks
    slowdowns = options["slowdowns"] or [1] * num_ranks
    in_flight = options["in_flight"] or [costs.num_stages - stage for stage in range(costs.num_stages)]
    for task in placement.tasks:
        rank = task.ranks[0]
        times[rank] += task.duration_us * Fraction(slowdowns[rank])
        if task.kind is Kind.F:
            again = costs.activation_bytes[task.stage] - task.held_bytes
            always[rank] += in_flight[task.stage] * task.held_bytes
            peaks = [entry.peak_bytes for entry in placement.tasks if entry.stage == task.stage]
            on_top[rank] = max(on_top[rank], again + max(peaks))
    limits = options["limit_bytes"]
    limits = [limits] * num_ranks if limits is None or isinstance(limits, int) else limits
    sums = zip(always, on_top, limits, strict=True)
    return times, all(limit is None or sum_ + top <= limit for sum_, top, limit in sums)


def cut_within(num_nodes: int, layer_costs: LayerCosts, **options: Any) -> Cut:
    with mock.patch("rota.cutting.cuts.NUM_NODES", num_nodes):
        return cut(layer_costs, **options)


@given(questions())
@settings(max_examples=some(200))
def test_no_cut_that_fits_is_better(question: tuple[LayerCosts, dict[str, Any]]) -> None:
    layer_costs, options = question
    ranks = options["ranks"]
    n = layer_costs.num_layers
    cuts = [[0, *inner, n] for inner in combinations(range(1, n), len(ranks) - 1)]
    possible = [times for times, fits in (weighed(layer_costs, each, options) for each in cuts) if fits]
    if not possible:
        with pytest.raises(SplitError, match=r"within limit_bytes .*: raise the limit, recompute more stages"):
            cut_within(100_000, layer_costs, **options)
        return
    found = cut_within(100_000, layer_costs, **options)
    assert weighed(layer_costs, list(found), options) == (list(found.rank_us), True)
    assert found.slowest_us == found.bound_us == min(map(max, possible))
    assert found.gap == 0
    if len(ranks) == max(ranks) + 1:
        squares = [sum(time**2 for time in each) for each in possible if max(each) == found.slowest_us]
        assert sum(time**2 for time in found.rank_us) == min(squares)


@given(questions(), st.integers(0, 40))
def test_however_short_the_search_its_bound_holds(question: tuple[LayerCosts, dict[str, Any]], num_nodes: int) -> None:
    layer_costs, options = question
    try:
        best = cut_within(100_000, layer_costs, **options)
    except SplitError:
        with pytest.raises(SplitError):
            cut_within(num_nodes, layer_costs, **options)
        return
    try:
        found = cut_within(num_nodes, layer_costs, **options)
    except SplitError as error:
        assert f"was found within {num_nodes} nodes of the search" in str(error)  # noqa: PT017
        return
    assert found.bound_us <= best.slowest_us <= found.slowest_us
    assert weighed(layer_costs, list(found), options) == (list(found.rank_us), True)


def test_a_large_embedding_and_head_get_their_own_stages() -> None:
    found = cut(chain_of([900, *[300] * 12, 900]), 6)
    assert list(found) == [0, 1, 4, 7, 10, 13, 14]
    assert found.rank_us == (900,) * 6


@pytest.mark.parametrize(
    ("stages_per_rank", "is_wave", "most_gap"), [(2, False, 0.02), (2, True, 0.02), (4, False, 0.03)]
)
def test_thirty_four_layers_on_eight_ranks(stages_per_rank: int, is_wave: bool, most_gap: float) -> None:
    ranks = placed(8, stages_per_rank, is_wave)
    times = [2_000, *(10_000 + i * 7919 % 601 for i in range(32)), 13_000]
    assert cut(chain_of(times), ranks).gap <= most_gap
    equal = cut(chain_of([2_000, *[10_000] * 32, 13_000]), ranks)
    assert (equal.gap, equal.slowest_us) == (0, 50_000)


def test_equal_layers_are_proven_at_once() -> None:
    found = cut_within(0, chain_of([300] * 128), ranks=placed(8, 4, is_wave=True))
    assert (found.gap, found.rank_us) == (0, (4800,) * 8)


def test_a_cut_is_its_boundaries() -> None:
    layer_costs = chain_of([300] * 4)
    found = cut(layer_costs, 2)
    assert isinstance(found, Cut)
    assert (len(found), found[1], found[1:], [*found]) == (3, 2, (2, 4), [0, 2, 4])
    assert layer_costs.stages(found).forward_us == (200, 200)
    assert layer_costs.cuts_at(found) == ("cut1",)
    assert cut(chain_of([0, 0]), 2).gap == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ranks": 0}, "ranks is 0: give at least 1 rank, or the rank of each stage"),
        ({"ranks": [0, 0, 1, 1]}, r"ranks is \[0, 0, 1, 1\]: .* in rounds that have every rank once"),
        ({"ranks": 5}, "4 layers for 5 stages: give fewer ranks"),
        ({"limit_bytes": [1]}, "limit_bytes has 1 entries for 2 ranks"),
        ({"in_flight": [1, -1]}, r"in_flight is \[1, -1\]: give 2 numbers of micro-batches"),
        ({"slowdowns": [1]}, "slowdowns has 1 entries for 2 ranks"),
        ({"slowdowns": [1, 0]}, r"slowdowns\[1\] is 0: give a number above 0"),
        ({"recompute": [2]}, "recompute has stage 2; the stages are 0 to 1"),
        ({"limit_bytes": 1}, r"no cut of 4 layers into 2 stages on 2 ranks within limit_bytes 1: raise the limit"),
    ],
)
def test_what_cannot_be_asked_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(SplitError, match=told):
        cut(chain_of([300] * 4), **{"ranks": 2} | options)
