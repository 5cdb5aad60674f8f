"""Links from times of messages, and measured between real processes."""

import pytest
from hypothesis import given, strategies as st

from rota import Cluster, Link, PipelineError
from rota.profiling.links import (
    LEVEL_SIZES,
    SIZES,
    SUM_SIZES,
    cluster_of,
    line_through,
    link_of,
    links_of,
    measure_links,
    numbers_of,
    unsteady,
)
from support.pool import Pool


def messages(latency_us: float, bytes_per_us: float) -> list[list[float]]:
    """Two messages of each size."""
    return [[latency_us + size / bytes_per_us] * 2 for size in SIZES]


@given(latency_us=st.integers(0, 5_000), bytes_per_us=st.integers(10, 50_000))
def test_times_on_a_line_are_met_exactly(latency_us: int, bytes_per_us: int) -> None:
    us, per_byte = line_through([(size, latency_us + size / bytes_per_us) for size in SIZES])
    assert us == pytest.approx(latency_us, rel=1e-6, abs=1e-3)
    assert per_byte * bytes_per_us == pytest.approx(1)
    assert link_of([messages(latency_us, bytes_per_us)]) == Link(latency_us, bytes_per_us)


def test_pairs_of_two_hosts_have_one_link_unless_they_differ() -> None:
    hosts = [0, 0, 2, 2]
    alone = {(0, 1): messages(10, 100), (2, 3): messages(10, 100), (1, 2): messages(50, 10), (0, 2): messages(51, 10)}
    links = links_of(alone, hosts)
    assert {links[0, 1], links[2, 3]} == {Link(10, 100)}
    assert len({links[pair] for pair in ((0, 2), (0, 3), (1, 2), (1, 3))}) == 1
    assert links[0, 3].bytes_per_us == 10
    differing = links_of({**alone, (0, 2): messages(50, 2)}, hosts)
    assert (differing[1, 2], differing[0, 2]) == (Link(50, 10), Link(50, 2))


def test_a_cluster_has_the_most_frequent_link_and_a_rate_per_host() -> None:
    near, far = Link(10, 100), Link(50, 10)
    links = {(0, 1): near, (2, 3): near, (0, 2): far, (0, 3): far, (1, 2): far, (1, 3): far}
    times = [10 + 2 * size / 80 for size in LEVEL_SIZES]  # two messages of two neighbours
    cluster = cluster_of(links, [0, 0, 2, 2], {"host a": (0, times), "host b": (2, times)})
    assert cluster.link == far
    assert cluster.links == ((0, 1, near), (1, 0, near), (2, 3, near), (3, 2, near))
    assert [(of.name, of.bytes_per_us, of.senders) for of in cluster.shared] == [
        ("host a", 80, (0, 1)),
        ("host b", 80, (2, 3)),
    ]


def test_times_that_vary_much_are_doubted() -> None:
    steady = {(0, 1): [[300.0, 301.0, 302.0, 499.0]] * len(SIZES)}
    assert unsteady(steady) == ""
    assert unsteady({(0, 1): [*steady[0, 1][1:], [300.0, 300.0, 900.0, 900.0, 900.0, 900.0]]}) == ""
    told = unsteady({(0, 1): [*steady[0, 1][1:], [300.0, 300.0, 300.0, 900.0, 900.0, 900.0, 900.0]]})
    assert told.startswith("16.8 MB between ranks 0 and 1 took 900 µs, but 300 µs or less in a quarter of the repeats")


def refuse_wrong_structure(cluster: Cluster, text: str, num_ranks: int) -> None:
    """What must hold however loaded the machine is."""
    assert cluster.num_ranks == num_ranks
    (shared,) = cluster.shared
    assert shared.name.startswith("host ")
    assert shared.senders == shared.receivers == (*range(num_ranks),)
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert [of.num_ranks for of in cluster.all_reduces] == [*numbers_of(num_ranks)]
    assert all([size for size, _ in of.times_us] == [*SUM_SIZES] for of in cluster.all_reduces)
    assert cluster.link.transfer_us(1 << 24) > 100  # 16 MB cannot be there at once
    assert all(f"\n{a} ↔ {a + 1}: 4.1 kB " in f"\n{text}" for a in range(num_ranks - 1))


def found_by(rank: int) -> tuple[Cluster, str, list[str]]:
    lines: list[str] = []
    found = measure_links(1, report=lines.append)
    return found.cluster, found.text, lines


@pytest.mark.dist
def test_three_processes_find_the_same(pool: Pool) -> None:
    (cluster, text, lines), *others = pool.run(3, found_by, timeout_s=200)
    assert others == [(cluster, text, [])] * 2
    refuse_wrong_structure(cluster, text, 3)
    assert lines == [
        "messages between 3 ranks, one at a time",
        "messages between all neighbours at once",
        "sums over ranks",
    ]


def refused(rank: int) -> str:
    with pytest.raises(PipelineError) as error:
        measure_links(1)
    return str(error.value)


@pytest.mark.dist
def test_a_process_alone_has_no_links(pool: Pool) -> None:
    assert pool.run(1, refused) == ["this is the only process, and a link needs two; start more of them"]
