"""Links, clusters and costs, and their text."""

import json
import re
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, strategies as st

from rota import AllReduceTimes, Cluster, Costs, FormatError, Link, PlacementError, RotaError, SharedLink, place
from support.core_strategies import clusters, costs


@given(st.integers(0, 10**12), st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_transfer_takes_latency_and_size_over_rate_rounded_up(num_bytes: int, latency: int, rate: int) -> None:
    assert Link(latency, rate).transfer_us(num_bytes) == latency + ceil(Fraction(num_bytes, rate))
    assert Link(latency).transfer_us(num_bytes) == latency


def test_a_pair_may_have_a_link_of_its_own_in_each_direction() -> None:
    cluster = Cluster((None, 5), Link(1), ((0, 1, Link(2)),))
    assert cluster.link_between(0, 1) == Link(2)
    assert cluster.link_between(1, 0) == Link(1)
    assert Cluster.uniform(2, 5, 1, 3) == Cluster((5, 5), Link(1, 3))


def test_a_transfer_uses_what_its_sender_and_its_receiver_share() -> None:
    host, card = SharedLink("host", 4, (0, 1), (0, 1)), SharedLink("card", 2, (1, 0), (2,))
    cluster = Cluster((None,) * 3, shared=(host, card))
    used = {(a, b): cluster.shared_between(a, b) for a in range(3) for b in range(3) if cluster.shared_between(a, b)}
    assert used == {(0, 0): (0,), (0, 1): (0,), (1, 0): (0,), (1, 1): (0,), (0, 2): (1,), (1, 2): (1,)}


@given(clusters(wired=True) | clusters())
def test_clusters_round_trip_in_json(given: Cluster) -> None:
    text = given.to_json()
    assert Cluster.from_json(text) == given
    assert Cluster.from_json(text).to_json() == text
    assert ("shared" in text) is bool(given.shared)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"link": [0, None, 1]}, "cluster.link is [0, null, 1]; expected a list of length 2"),
        ({"link": [0, 0]}, "cluster.link[1] is 0; expected 1 or more"),
        ({"links": [[0]]}, "cluster.links[0] is [0]; expected a list of length 4"),
        ({"shared": [{"name": "host"}]}, "cluster.shared[0] has no field 'bytes_per_us'"),
        ({"shared": [{"name": "a\nb", "bytes_per_us": 1, "senders": [0], "receivers": [0]}]}, "shared[0].name is"),
        (
            {"shared": [{"name": "host", "bytes_per_us": 1, "senders": [0], "receivers": [2]}]},
            "the shared link host has rank 2, outside the cluster of 2 ranks",
        ),
    ],
)
def test_wrong_cluster_files_are_told_with_place_and_value(fields: dict[str, object], told: str) -> None:
    text = json.dumps({**json.loads(Cluster.uniform(2).to_json()), **fields})
    with pytest.raises(RotaError, match=re.escape(told)):
        Cluster.from_json(text)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Cluster.uniform(0), "num_ranks is 0: a cluster needs at least 1 rank"),
        (lambda: Cluster((None, -1)), "limit_bytes[1] is -1"),
        (lambda: Cluster((None,), Link(), ((0, 1, Link()),)), "link 0 -> 1 leaves the cluster of 1 ranks"),
        (lambda: Link(-1), "latency_us is -1"),
        (lambda: SharedLink("host", 0, (0,), (1,)), "bytes_per_us of host is 0: nothing would arrive"),
        (lambda: SharedLink("host", 1, (), (1,)), "senders of the shared link host is (): give different ranks"),
        (lambda: AllReduceTimes(1, ((1, 2),)), "all-reduces of 1 ranks take ((1, 2),): give 2 ranks or more"),
        (lambda: AllReduceTimes(2, ((0, 2),)), "ascending sizes from 1 byte"),
        (lambda: AllReduceTimes(2, ((1, 5), (2, 4))), "with times that do not fall"),
        (lambda: Cluster((None,), all_reduces=(AllReduceTimes(2, ((1, 2),)),)), "all_reduces are of [2] ranks: give"),
        (
            lambda: Cluster((None,), shared=(SharedLink("host", 1, (0,), (1,)),)),
            "the shared link host has rank 1, outside the cluster of 1 ranks",
        ),
        (lambda: Link(0, 0), "bytes_per_us is 0: nothing would arrive; use None for no limit, else 1 or more"),
    ],
)
def test_links_and_clusters_that_make_no_sense_are_refused(make: object, told: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(told)):
        make()  # type: ignore[operator]


GIVEN = Costs((1, 2, 3), (4, 5, 6), activation_bytes=7, boundary_bytes=(8, 9), edges=((0, 1), (0, 2)))


def test_whole_floats_become_whole_numbers() -> None:
    assert Cluster.uniform(1, 80e9, 2.0, 1e3).to_json() == Cluster.uniform(1, 80_000_000_000, 2, 1000).to_json()
    assert Costs((1.0,), 2.0, static_bytes=3e9).to_json() == Costs((1,), 2, static_bytes=3_000_000_000).to_json()


def test_one_number_stands_for_every_stage() -> None:
    assert GIVEN.activation_bytes == (7, 7, 7)
    assert GIVEN.boundary_bytes == (8, 9)
    assert Costs.uniform(3).boundary_bytes == 0  # a number until the edges are known
    assert Costs.uniform(2, 3, 4, 5, 6, reduce_us=7) == Costs((3, 3), (4, 4), (5, 5), (6, 6), reduce_us=(7, 7))


def test_the_input_gradient_frees_half_unless_told() -> None:
    assert Costs.uniform(2, activation_bytes=5).freed_by_input == (2, 2)
    assert Costs.uniform(2, activation_bytes=5, input_frees_bytes=0).freed_by_input == (0, 0)
    more = Costs.uniform(2, activation_bytes=5, input_frees_bytes=(-3, 1), weight_us=1)
    assert Costs.from_json(more.to_json()) == more
    assert [task.held_bytes for task in place(more, Cluster.uniform(2)).tasks] == [5, 5, 3, -1, -8, -4]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"forward_us": ()}, "forward_us is (): give one time per stage, or use Costs.uniform(num_stages)"),
        ({"backward_us": (1, 2)}, "backward_us has 2 entries for 3; give 3, or a single number for all"),
        ({"backward_us": (1, 2, -3)}, "backward_us[2] is -3: give a whole number of 0 or more"),
        ({"backward_us": None}, "backward_us is None"),
        ({"weight_us": (1, 2.5, 3)}, "weight_us[1] is 2.5"),
        ({"boundary_bytes": (1,)}, "boundary_bytes has 1 entries for 2"),
        ({"edges": ((0, 1, 2),)}, "edges is ((0, 1, 2),): give (source, target) pairs of stages"),
        ({"input_frees_bytes": (0, 2, 0)}, "input_frees_bytes[1] is 2, more than activation_bytes[1] = 1"),
    ],
)
def test_costs_that_make_no_sense_are_refused(fields: dict[str, object], told: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(told)):
        Costs(**{"forward_us": (1, 1, 1), "backward_us": 1, "activation_bytes": 1, **fields})  # type: ignore[arg-type]


@given(costs())
def test_json_round_trip(given: Costs) -> None:
    text = given.to_json()
    assert Costs.from_json(text) == given
    assert Costs.from_json(text).to_json() == text


def test_fields_with_a_default_may_be_left_out() -> None:
    assert Costs.from_json('{"rota": "costs", "forward_us": [1, 2], "backward_us": [3, 4]}') == Costs((1, 2), (3, 4))


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(GIVEN.to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"rota": "costs", "forward_us": [1]', "not JSON: Expecting ',' delimiter at line 1, column 36"),
        ('{"rota": "costs", "forward_us": [1]}', "costs has no field 'backward_us'; it has rota, forward_us"),
        (changed(rota="plan"), 'not a costs file: it says "rota": "plan"'),
        (changed(forward_us=[1, True, 3]), "costs.forward_us[1] is true; expected a whole number"),
        (changed(backward_us=[1, 2, -1]), "costs.backward_us[2] is -1; expected 0 or more"),
        (changed(backward_us=4), "costs.backward_us is 4; expected a list"),
        (changed(edges=[[0, 1], 2]), "costs.edges[1] is 2; expected a list"),
        (changed(edges=[[0, 1], [2]]), "costs.edges[1] is [2]; expected a list of length 2"),
        (changed(reduce_us=[10**15 + 1] * 3), "reduce_us[0] is 1000000000000001; expected 1000000000000000 or less"),
    ],
)
def test_what_is_wrong_is_told_with_place_and_value(text: str, told: str) -> None:
    with pytest.raises(RotaError) as caught:
        Costs.from_json(text)
    assert told in str(caught.value)
    assert isinstance(caught.value, FormatError | PlacementError)


def test_the_spread_of_measured_times_is_kept() -> None:
    assert (Costs.uniform(2).spread_us, Costs.uniform(2).spread) == (None, 0.0)
    costs = Costs((10, 20), (20, 40), (10, 0), recompute_us=(None, 20), activation_bytes=1, spread_us=(6, 4))
    assert costs.spread == 6 / 40
    assert Costs.from_json(costs.to_json()) == costs
    with pytest.raises(PlacementError, match="spread_us has 1 entries for 2"):
        Costs.uniform(2, spread_us=(1,))


def test_no_stages_are_refused() -> None:
    with pytest.raises(PlacementError, match="num_stages is 0: a pipeline needs at least 1 stage"):
        Costs.uniform(0)
