"""Links and clusters, and their text."""

from __future__ import annotations

import json
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, strategies as st

from rota.core.cluster import AllReduceTimes, Cluster, Link, SharedLink
from rota.core.errors import PlacementError, RotaError
from support.core_strategies import clusters


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
        (
            {"shared": [{"name": "a\nb", "bytes_per_us": 1, "senders": [0], "receivers": [0]}]},
            "cluster.shared[0].name is",
        ),
        (
            {"shared": [{"name": "host", "bytes_per_us": 1, "senders": [0], "receivers": [2]}]},
            "the shared link host has rank 2, outside the cluster of 2 ranks",
        ),
    ],
)
def test_wrong_cluster_files_are_told_with_place_and_value(fields: dict[str, object], told: str) -> None:
    text = json.dumps({**json.loads(Cluster.uniform(2).to_json()), **fields})
    with pytest.raises(RotaError) as caught:
        Cluster.from_json(text)
    assert told in str(caught.value)


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
    with pytest.raises(PlacementError) as caught:
        make()  # type: ignore[operator]
    assert told in str(caught.value)
