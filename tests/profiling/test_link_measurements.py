"""What measurements of messages say: the cluster that follows from them, refusals, and the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rota import Cluster, Link
from rota.cluster import AllReduceTimes, SharedLink
from rota.profiling.all_reduces import numbers_of
from rota.profiling.host_links import _taken_by_others, pairs_of
from rota.profiling.host_messages import ROUND_SIZES, SIZES
from rota.profiling.link_fits import Sample, sample_of
from rota.profiling.link_measurements import HostRounds, LinkMeasurements, Pair
from rota.profiling.occupancy import SIZES as COST_SIZES


def line(us: float, rate: float) -> Callable[[int], float]:
    return lambda num_bytes: us + num_bytes / rate


def samples(of: Callable[[int], float], sizes: tuple[int, ...] = SIZES) -> list[Sample]:
    return [sample_of(size, [of(size)] * 3) for size in sizes]


def measurements(hosts: tuple[int, ...], alone: dict[Pair, Callable[[int], float]]) -> LinkMeasurements:
    """Messages that take known times; 100 µs and 10,000 bytes/µs at the sender, 50 µs and 10,000 at the receiver."""
    send, receive = line(100, 10_000), line(50, 10_000)
    rounds = []
    for host in sorted({*hosts}):
        ranks = tuple(rank for rank, of in enumerate(hosts) if of == host)
        if len(ranks) > 1:
            num, most = 2 * (len(ranks) - 1), min(len(ranks) - 1, 2)
            times = [most * (send(n) + receive(n)) + num * n / 2_500 for n in ROUND_SIZES]
            of_sizes = tuple(sample_of(n, [us]) for n, us in zip(ROUND_SIZES, times, strict=True))
            rounds.append(HostRounds(f"host {host}", ranks, num, most, of_sizes))
    return LinkMeasurements(
        hosts,
        {pair: sample_of(1, [40.0]) for pair in alone},
        {pair: samples(of) for pair, of in alone.items()},
        {pair: samples(lambda n, of=of: of(n) + 200) for pair, of in alone.items()},  # type: ignore[misc]
        samples(send, COST_SIZES),
        samples(receive, COST_SIZES),
        rounds,
        sample_of(0, [7.0]),
    )


def on_one_host(num_ranks: int, of: Callable[[int], float]) -> LinkMeasurements:
    pairs = [*pairs_of([0] * num_ranks)]
    return measurements((0,) * num_ranks, dict.fromkeys([*pairs, *((b, a) for a, b in pairs)], of))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_one_host_is_one_link_and_what_is_shared(num_ranks: int) -> None:
    cluster = on_one_host(num_ranks, line(310, 2_500)).cluster()
    ranks = tuple(range(num_ranks))
    link = Link(160, 5_000, 100, 10_000, 50, 10_000)
    assert cluster == Cluster((None,) * num_ranks, link, (), (SharedLink("host 0", 2_500, ranks, ranks),), 7)
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_ranks_that_wait_in_place_of_computing_have_no_costs_but_wake_up_late() -> None:
    cluster = on_one_host(4, line(310, 2_500)).cluster(rehearsal=True)
    assert cluster.link == Link(510, 2_500)
    assert cluster.gap_us == 0
    (shared,) = cluster.shared
    rounds = on_one_host(4, line(310, 2_500)).shared[0]
    assert shared.bytes_per_us == round(rounds.bytes_per_us)  # the rounds as a whole
    assert shared.bytes_per_us < 2_500


def test_sleepers_are_measured_between_neighbours_and_count_for_all_pairs_of_their_hosts() -> None:
    found = on_one_host(4, line(310, 2_500))
    slept = {(a, b): samples(line(900, 2_000)) for a in range(4) for b in range(4) if abs(a - b) == 1}
    cluster = replace(found, asleep=slept).cluster(rehearsal=True)
    assert (cluster.link, cluster.links) == (Link(900, 2_000), ())
    assert "\n0 → 1  40 µs  310 µs  900 µs  " in replace(found, asleep=slept).to_text()
    assert "\n0 → 2  40 µs  310 µs  " in replace(found, asleep=slept).to_text()


def test_hosts_without_neighbours_keep_what_was_measured_beside_computing() -> None:
    hosts = (0, 1, 0, 1)  # every second rank: no neighbour is on the same host
    pairs = [pair for ab in pairs_of(hosts) for pair in (ab, ab[::-1])]
    alone = {(a, b): line(310, 2_500) if hosts[a] == hosts[b] else line(400, 1_000) for a, b in pairs}
    slept = {(a, b): samples(line(900, 500)) for a in range(4) for b in range(4) if abs(a - b) == 1}
    cluster = replace(measurements(hosts, alone), asleep=slept).cluster(rehearsal=True)
    assert cluster.link_between(0, 2) == Link(310, 2_500)
    assert cluster.link_between(0, 1) == cluster.link_between(3, 0) == Link(900, 500)


def test_hosts_have_links_of_their_own_in_each_direction() -> None:
    hosts = (0, 0, 1, 1)
    within, there, back = line(310, 2_500), line(400, 1_000), line(400, 500)
    pairs = [pair for ab in pairs_of(hosts) for pair in (ab, ab[::-1])]
    alone = {(a, b): within if hosts[a] == hosts[b] else (there if a < b else back) for a, b in pairs}
    cluster = measurements(hosts, alone).cluster()
    rates = {(a, b): cluster.link_between(a, b).bytes_per_us for a in range(4) for b in range(4) if a != b}
    assert {rates[pair] for pair in ((0, 1), (1, 0), (2, 3), (3, 2))} == {5_000}
    assert {rates[pair] for pair in ((0, 2), (0, 3), (1, 2), (1, 3))} == {1_250}
    assert {rates[pair] for pair in ((2, 0), (3, 0), (2, 1), (3, 1))} == {556}
    assert [(shared.name, shared.senders) for shared in cluster.shared] == [("host 0", (0, 1)), ("host 1", (2, 3))]
    assert cluster.shared_between(0, 2) == ()


def test_pairs_that_differ_by_far_keep_links_of_their_own() -> None:
    near = on_one_host(3, line(310, 2_500))
    assert near.cluster().links == ()
    slow = replace(near, paced={**near.paced, (0, 2): samples(line(310, 500))})
    cluster = slow.cluster()
    assert [pair[:2] for pair in cluster.links] == [(0, 2)]
    assert cluster.link_between(0, 2).bytes_per_us == 556
    assert cluster.link_between(2, 0) == near.cluster().link


def test_pairs_that_are_measured_are_some_of_each_two_hosts_neighbours_first() -> None:
    assert [*pairs_of([0] * 4)] == [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3)]
    assert [*pairs_of([0] * 8)] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    two = [*pairs_of([0] * 8 + [1] * 8)]
    assert (len(two), two.count((7, 8))) == (18, 1)
    assert [*pairs_of([0])] == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (sample_of(1, [-3.0]), r"1 B from rank 0, which had computed, to rank 1 took -3\.0 µs"),
        (
            sample_of(1 << 24, [4.0]),
            r"16\.8 MB from rank 0, .*, to rank 1 took 4\.0 µs, more than 1 TB/s",
        ),
        (
            sample_of(1, [300.0, 300.0, 300.0, 3000.0, 3000.0, 3000.0, 3000.0]),
            r"to rank 1 or of 1 other pair took 1655 µs, but 305 µs or less in a quarter of the repeats",
        ),
    ],
)
def test_what_cannot_be_is_told(wrong: Sample, told: str) -> None:
    right = on_one_host(2, line(310, 2_500))
    assert right.implausible(2.0) == ""
    changed = replace(right, paced={**right.paced, (0, 1): [wrong, *right.paced[0, 1][1:]]})
    with pytest.raises(AssertionError, match=told):
        assert not changed.implausible(2.0), changed.implausible(2.0)
    negative = replace(right, gap=sample_of(0, [-1.0]), send=[sample_of(1, [-5.0])], receive=[sample_of(1, [-9.0])])
    assert negative.implausible(2.0) == ""  # differences of two times may be below 0: they count as none
    assert (negative.cluster().link.send_us, negative.cluster().gap_us) == (0, 1)  # 0 µs is a gap not measured


def test_one_pair_that_was_disturbed_says_little_about_the_link_of_twelve() -> None:
    right = on_one_host(4, line(310, 2_500))
    disturbed = sample_of(1 << 18, [149.0] * 3 + [670.0] * 4)
    first, second, _, *others = right.paced[1, 2]
    changed = replace(right, paced={**right.paced, (1, 2): [first, second, disturbed, *others]})
    assert changed.implausible(2.0) == ""
    assert changed.cluster().links == ()
    for pair in right.paced:
        changed = replace(changed, paced={**changed.paced, pair: [first, second, disturbed, *others]})
    told = "262 kB from rank 0, which had computed, to rank 1 or of 11 other pairs took 670 µs, but 149 µs or less"
    assert told in changed.implausible(2.0)


def test_sums_may_wait_for_a_core_and_not_longer() -> None:
    found = on_one_host(2, line(310, 2_500))
    waited = sample_of(1 << 16, [551.0] * 3 + [2816.0] * 4)
    assert replace(found, all_reduces={2: [waited]}).implausible(2.0) == ""
    disturbed = sample_of(1 << 16, [551.0] * 3 + [9000.0] * 4)
    told = replace(found, all_reduces={2: [disturbed]}).implausible(2.0)
    assert "all-reduce of 65.5 kB by 2 ranks took 9000 µs" in told


def test_every_column_of_the_table_is_explained_and_a_busy_machine_is_told() -> None:
    text = replace(on_one_host(2, line(310, 2_500)), ranks_per_core=2.0, busy=0.4).to_text()
    header, first = text.splitlines()[:2]
    for name in header.split():
        assert f"\n  {name} " in text
    assert first.split()[:3] == ["0", "→", "1"]
    assert "2 ranks share a core: what a message costs its ranks includes" in text
    assert "other programs took 40% of the cores' time during the measurement: end them, and measure again" in text


def test_sums_are_in_the_cluster_and_in_the_table_and_never_fall() -> None:
    found = on_one_host(4, line(310, 2_500))
    of_two = [sample_of(size, [us]) for size, us in ((1_000, 90.4), (64_000, 80.0), (1_000_000, 900.0))]
    found = replace(found, all_reduces={4: of_two[:1], 2: of_two})
    times = AllReduceTimes(2, ((1_000, 90), (64_000, 90), (1_000_000, 900))), AllReduceTimes(4, ((1_000, 90),))
    assert found.cluster().all_reduces == times
    assert found.cluster(rehearsal=True).all_reduces == ()  # ranks that wait sum nothing
    assert "\n2         1 MB   900 µs  0%" in found.to_text()
    assert replace(found, all_reduces={2: [sample_of(4, [0.0])]}).implausible(2.0) == (
        "an all-reduce of 4 B by 2 ranks took 0.0 µs"
    )
    assert [*numbers_of(2)] == [2]
    assert [*numbers_of(7)] == [2, 4, 7]
    assert [*numbers_of(8)] == [2, 4, 8]


def test_cores_that_others_take_are_counted_of_the_busiest_host() -> None:
    assert _taken_by_others([0, 0], [2, 2], [1.0, 1.0]) == 0
    assert _taken_by_others([0, 0], [2, 2], [1.0, 0.5]) == 0.25
    assert _taken_by_others([0] * 4, [2] * 4, [0.5] * 4) == 0  # ranks that share cores get all of them
    assert _taken_by_others([0] * 4, [2] * 4, [0.25] * 4) == 0.5
    assert _taken_by_others([0, 0], [16, 16], [1.0, 1.0]) == 0  # cores that no rank needs
    assert _taken_by_others([0, 0, 2, 2], [2] * 4, [1.0, 1.0, 1.0, 0.8]) == pytest.approx(0.1)
