"""`cut` against all cuts there are: ranks with several stages, limits, slow ranks, recomputation."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import SplitError
from rota.core.layers import LayerCosts
from rota.core.placing import interleaved, place, wave
from rota.core.tasks import Kind
from rota.cutting import Cut, cut
from rota.cutting.cut_problem import StageMemory
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
    forward = [time // 3 for time in times]
    zeros: dict[str, Any] = dict.fromkeys(
        (
            *("recompute_us", "optimizer_us", "waiting_bytes", "forward_peak_bytes", "backward_peak_bytes"),
            *("input_peak_bytes", "weight_peak_bytes", "gradient_bytes", "buffer_bytes", "optimizer_bytes"),
        ),
        (0,) * n,
    )
    backward = tuple(time - f for time, f in zip(times, forward, strict=True))
    return LayerCosts(
        rows=1,
        cuts=tuple(f"cut{i}" for i in range(n - 1)),
        forward_us=tuple(forward),
        backward_us=backward,
        input_us=backward,
        weight_us=(0,) * n,
        kept_bytes=(kept,) * n,
        parameter_bytes=(1,) * n,
        edges=tuple((i, i + 1) for i in range(n - 1)),
        boundary_bytes=(0,) * (n - 1),
        boundary_gradient_bytes=(0,) * (n - 1),
        received_bytes=(0,) * (n - 1),
        **zeros,
    )


@st.composite
def questions(draw: st.DrawFn) -> tuple[LayerCosts, int, dict[str, Any]]:
    given_layers = draw(layers())
    shapes = [("chain", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3), ("wave", 2)]
    most = {shape: given_layers.num_layers // shape[1] for shape in shapes}
    placement, a_rank = draw(st.sampled_from([shape for shape in shapes if most[shape]]))
    num_ranks = draw(st.integers(1, most[placement, a_rank]))
    stages = num_ranks * a_rank
    limits = st.none() | st.integers(0, 80) | st.tuples(*[st.none() | st.integers(0, 60)] * num_ranks)
    options = {
        "placement": placement,
        "stages_per_rank": a_rank,
        "limit_bytes": draw(limits),
        "in_flight": draw(st.none() | st.tuples(*[st.integers(0, 3)] * stages)),
        "slowdowns": draw(st.none() | st.tuples(*[st.sampled_from([0.5, 1, 1.1, 3])] * num_ranks)),
        "extra_us": draw(st.tuples(st.integers(0, 9), st.integers(0, 9))),
        "split_backward": draw(st.booleans()),
        "recompute": draw(st.sets(st.integers(0, stages - 1))),
    }
    return given_layers, num_ranks, options


def weighed(
    given_layers: LayerCosts, num_ranks: int, boundaries: list[int], options: dict[str, Any]
) -> tuple[list[Fraction], bool]:
    """Each rank's time, and whether all fit, by way of the costs and the placement that a plan would have."""
    recompute, split = options["recompute"], options["split_backward"]
    costs = given_layers.stages(boundaries, split_backward=split, recompute=recompute)
    shape = wave if options["placement"] == "wave" else interleaved
    alike = shape(Costs.uniform(costs.num_stages), Cluster.uniform(num_ranks))  # it takes no skips
    ranks = [alike.ranks_of(stage) for stage in range(costs.num_stages)]
    placement = place(costs, Cluster.uniform(num_ranks), ranks)
    times = [Fraction(0)] * num_ranks
    always, on_top = list(placement.static_bytes), [0] * num_ranks
    slowdowns = options["slowdowns"] or [1] * num_ranks
    num_stages = costs.num_stages
    in_flight = options["in_flight"] or [num_stages - stage for stage in range(num_stages)]
    for task in placement.tasks:
        rank = task.ranks[0]
        times[rank] += task.duration_us * Fraction(slowdowns[rank])
        if task.kind is Kind.F:
            again = costs.activation_bytes[task.stage] - task.held_bytes
            always[rank] += in_flight[task.stage] * task.held_bytes
            peaks = [entry.peak_bytes for entry in placement.tasks if entry.stage == task.stage]
            on_top[rank] = max(on_top[rank], again + max(peaks))
    for stage, extra in ((0, options["extra_us"][0]), (num_stages - 1, options["extra_us"][1])):
        rank = placement.ranks_of(stage)[0]
        times[rank] += extra * Fraction(slowdowns[rank])
    limits = options["limit_bytes"]
    limits = [limits] * num_ranks if limits is None or isinstance(limits, int) else limits
    sums = zip(always, on_top, limits, strict=True)
    return times, all(limit is None or sum_ + top <= limit for sum_, top, limit in sums)


def all_cuts(num_layers: int, num_stages: int) -> list[list[int]]:
    return [[0, *inner, num_layers] for inner in combinations(range(1, num_layers), num_stages - 1)]


@given(questions())
@settings(max_examples=some(200))
def test_no_cut_that_fits_is_better(question: tuple[LayerCosts, int, dict[str, Any]]) -> None:
    given_layers, num_ranks, options = question
    num_stages = num_ranks * options["stages_per_rank"]
    cuts = all_cuts(given_layers.num_layers, num_stages)
    possible = [times for times, fits in (weighed(given_layers, num_ranks, each, options) for each in cuts) if fits]
    if not possible:
        with pytest.raises(SplitError, match=r"within limit_bytes .*: raise the limit, recompute more stages"):
            cut(given_layers, num_ranks, num_nodes=100_000, **options)
        return
    found = cut(given_layers, num_ranks, num_nodes=100_000, **options)
    times, fits = weighed(given_layers, num_ranks, list(found), options)
    assert fits
    assert list(found.rank_us) == times
    assert found.slowest_us == found.bound_us == min(map(max, possible))
    assert found.gap == 0
    if options["stages_per_rank"] == 1:
        squares = [sum(time**2 for time in each) for each in possible if max(each) == found.slowest_us]
        assert sum(time**2 for time in times) == min(squares)


@given(layers(), st.booleans(), st.data())
def test_a_stage_holds_what_its_costs_say(given_layers: LayerCosts, split: bool, data: st.DataObject) -> None:
    n = given_layers.num_layers
    inner = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=n - 1)))
    boundaries = [0, *inner, n]
    stages = range(len(boundaries) - 1)
    recompute = data.draw(st.sets(st.sampled_from(stages)))
    costs = given_layers.stages(boundaries, split_backward=split, recompute=recompute)
    memory = StageMemory(given_layers, [None], [1] * len(stages), split, recompute)
    for stage, run in enumerate(pairwise(boundaries)):
        held, kept = costs.activation_bytes[stage], costs.checkpoint_bytes[stage]
        again = held - kept if stage in recompute else 0
        peaks = [costs.forward_peak_bytes[stage], costs.backward_peak_bytes[stage], costs.weight_peak_bytes[stage]]
        found = memory.needed(stage, *run)
        assert found == (costs.static_bytes[stage] + held - again, again + max(peaks))


@given(questions(), st.integers(0, 40))
def test_however_short_the_search_its_bound_holds(
    question: tuple[LayerCosts, int, dict[str, Any]], num_nodes: int
) -> None:
    given_layers, num_ranks, options = question
    try:
        best = cut(given_layers, num_ranks, num_nodes=100_000, **options)
    except SplitError:
        with pytest.raises(SplitError):
            cut(given_layers, num_ranks, num_nodes=num_nodes, **options)
        return
    try:
        found = cut(given_layers, num_ranks, num_nodes=num_nodes, **options)
    except SplitError as error:
        assert f"was found within {num_nodes} nodes; raise num_nodes" in str(error)  # noqa: PT017
        return
    assert found.bound_us <= best.slowest_us <= found.slowest_us
    assert weighed(given_layers, num_ranks, list(found), options) == (list(found.rank_us), True)


# --- sizes of real models -------------------------------------------------------------------------------------------


def test_a_large_embedding_and_head_get_their_own_stages() -> None:
    found = cut(chain_of([900, *[300] * 12, 900]), 6)
    assert list(found) == [0, 1, 4, 7, 10, 13, 14]
    assert found.rank_us == (900,) * 6


@pytest.mark.parametrize(
    ("placement", "a_rank", "most_gap"), [("interleaved", 2, 0.02), ("wave", 2, 0.02), ("interleaved", 4, 0.03)]
)
def test_thirty_four_layers_on_eight_ranks(placement: Any, a_rank: int, most_gap: float) -> None:
    times = [2_000, *(10_000 + i * 7919 % 601 for i in range(32)), 13_000]
    found = cut(chain_of(times), 8, stages_per_rank=a_rank, placement=placement)
    assert found.gap <= most_gap
    equal = cut(chain_of([2_000, *[10_000] * 32, 13_000]), 8, stages_per_rank=a_rank, placement=placement)
    assert (equal.gap, equal.slowest_us) == (0, 50_000)


def test_equal_layers_are_proven_at_once() -> None:
    found = cut(chain_of([300] * 128), 8, stages_per_rank=4, placement="wave", num_nodes=0)
    assert (found.gap, found.rank_us) == (0, (4800,) * 8)


def test_a_hundred_and_twenty_eight_layers_on_sixty_four_ranks() -> None:
    times = [300 + i * 7919 % 101 for i in range(128)]
    found = cut(chain_of(times, kept=1), 64, limit_bytes=200, slowdowns=[1 + rank % 3 / 10 for rank in range(64)])
    assert found.gap == 0
    assert len(found) == 65


def test_a_cut_is_its_boundaries() -> None:
    given_layers = chain_of([300] * 4)
    found = cut(given_layers, 2)
    assert isinstance(found, Cut)
    assert (len(found), found[1], found[1:], [*found]) == (3, 2, (2, 4), [0, 2, 4])
    assert given_layers.stages(found).forward_us == (200, 200)
    assert given_layers.cuts_at(found) == ("cut1",)
    assert cut(chain_of([0, 0]), 2).gap == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_ranks": 0}, "num_ranks is 0: give at least 1"),
        ({"stages_per_rank": 0}, "stages_per_rank is 0: give at least 1"),
        ({"placement": "vave"}, r"placement is 'vave': give one of chain, interleaved, wave; perhaps wave\?"),
        ({"stages_per_rank": 2}, "stages_per_rank is 2, but a chain has 1; give 'interleaved' or 'wave'"),
        ({"stages_per_rank": 1, "placement": "wave"}, "stages_per_rank is 1, but a wave goes down and up"),
        ({"num_ranks": 5}, r"4 layers for 5 stages \(5 ranks, 1 per rank\): give fewer ranks"),
        ({"limit_bytes": [1]}, "limit_bytes has 1 entries for 2 ranks"),
        ({"limit_bytes": [None] * 3}, "limit_bytes has 3 entries for 2 ranks"),
        ({"in_flight": [1]}, r"in_flight is \[1\]: give 2 numbers of micro-batches"),
        ({"in_flight": [1, -1]}, r"in_flight is \[1, -1\]: give 2 numbers of micro-batches"),
        ({"slowdowns": [1]}, "slowdowns has 1 entries for 2 ranks"),
        ({"slowdowns": [1, 0]}, r"slowdowns\[1\] is 0: give a number above 0"),
        ({"slowdowns": [float("nan"), 1]}, r"slowdowns\[0\] is nan: give a number above 0"),
        ({"recompute": [2]}, "recompute has stage 2; the stages are 0 to 1"),
        ({"extra_us": (0, -1)}, r"extra_us is \(0, -1\): give two numbers of 0 or more"),
        ({"limit_bytes": 1}, r"no cut of 4 layers into 2 stages on 2 ranks within limit_bytes 1: raise the limit"),
    ],
)
def test_what_cannot_be_asked_is_refused(options: dict[str, Any], told: str) -> None:
    num_ranks = options.pop("num_ranks", 2)
    with pytest.raises(SplitError, match=told):
        cut(chain_of([300] * 4), num_ranks, **options)
