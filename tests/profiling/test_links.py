"""Links from times of messages, and measured between real processes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rota import Cluster, Link, PipelineError
from rota.profiling import links_of_this_machine, machine_links
from rota.profiling.links import (
    LEVEL_SIZES,
    SIZES,
    SUM_SIZES,
    MeasuredLinks,
    Report,
    cluster_of,
    line_through,
    link_of,
    links_of,
    measure_links,
    numbers_of,
    unsteady,
)
from support.pool import Pool, on_ranks


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


@on_ranks(1)
def test_a_process_alone_has_no_links(rank: int) -> None:
    with pytest.raises(PipelineError, match="this is the only process, and a link needs two; start more"):
        measure_links(1)


# --- links of this machine: measured once, then kept for as long as they hold -----------------------------------------


class Started:
    """Instead of processes: counts how often links are measured."""

    def __init__(self) -> None:
        self.count = 0
        self.devices: list[str] = []
        self.doubt = ""

    def __call__(self, num: int, device: str, repeats: int, report: Report, within_s: float) -> MeasuredLinks:
        self.count += 1
        self.devices.append(device)
        assert within_s > 1.0
        report("measures")
        cluster = Cluster((None,) * num, Link(self.count, 100))
        return MeasuredLinks(cluster, "a table\nof two lines", self.doubt)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    of = Started()
    monkeypatch.setattr(machine_links, "links_of_started", of)
    return of


def test_what_was_measured_is_kept_and_measured_again_if_asked(started: Started, tmp_path: Path) -> None:
    told: list[str] = []
    first = links_of_this_machine(2, cache=str(tmp_path), report=told.append)
    assert links_of_this_machine(2, cache=str(tmp_path), report=told.append) == first
    assert started.count == 1
    assert told[0] == "measures"
    assert told[1].startswith(f"links: from {tmp_path}/rota-links-")
    assert links_of_this_machine(3, cache=str(tmp_path)).cluster.num_ranks == 3  # a file of its own
    assert links_of_this_machine(2, cache=str(tmp_path)) == first
    assert links_of_this_machine(2, cache=str(tmp_path), refresh=True).cluster.link == Link(3, 100)
    assert len([*tmp_path.iterdir()]) == 2
    assert links_of_this_machine(2, cache=str(tmp_path)).text == "a table\nof two lines"


def test_without_time_links_are_not_measured_but_kept_ones_are_found(started: Started, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"there was no time for it; give a longer --time-limit once, or the"):
        links_of_this_machine(2, cache=str(tmp_path), within_s=1.0)
    assert started.count == 0
    first = links_of_this_machine(2, cache=str(tmp_path), within_s=100.0)
    assert links_of_this_machine(2, cache=str(tmp_path), within_s=0.0) == first
    assert started.count == 1


def test_links_of_a_busy_machine_are_doubted_and_measured_again_next_time(started: Started, tmp_path: Path) -> None:
    path, told = tmp_path / "links.json", list[str]()
    started.doubt = "other programs took 40% of the cores' time during the measurement: end them, and measure again"
    first = links_of_this_machine(2, cache=str(path), report=told.append)
    assert first.doubt == started.doubt
    assert told == ["measures", f"links are not kept: {started.doubt}"]
    assert not path.exists()
    started.doubt = ""
    again = links_of_this_machine(2, cache=str(path))
    assert again != first
    started.doubt = "busy"
    assert links_of_this_machine(2, cache=str(path), refresh=True).doubt == "busy"
    assert links_of_this_machine(2, cache=str(path)) == again  # what was kept stays


def test_a_rank_alone_has_no_links(started: Started, tmp_path: Path) -> None:
    assert links_of_this_machine(1, cache=str(tmp_path)).cluster == Cluster.uniform(1)
    assert (started.count, [*tmp_path.iterdir()]) == (0, [])


def test_links_are_in_the_users_cache(started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    links_of_this_machine(2)
    links_of_this_machine(2)
    assert started.count == 1
    assert [path.suffix for path in (tmp_path / "rota").iterdir()] == [".json"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert links_of_this_machine(2).cluster.num_ranks == 2  # a cache that nobody asked for may be impossible
    with pytest.raises(PipelineError, match=r"cannot write the links /proc/nowhere/.*; give another cache"):
        links_of_this_machine(2, cache="/proc/nowhere")


def change(field: str, value: Any) -> Any:
    def changed(fields: dict[str, Any]) -> str:
        where, name = (fields["key"], field[4:]) if field.startswith("key.") else (fields, field)
        where[name] = value
        return json.dumps(fields)

    return changed


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (change("key.torch", "1.0"), 'has other links (torch was "1.0"): measuring again'),
        (change("measured_s", 0), "days old: measuring again"),
        (change("measured_s", "now"), 'links.measured_s is "now"; expected a whole number; measuring again'),
        (change("cluster", {"limit_bytes": [None] * 3, "link": [0, None], "links": []}), "ranks was"),
        (lambda _: '{"rota": "plan"}', 'it says "rota": "plan"'),
    ],
)
def test_what_does_not_hold_here_is_measured_again(changed: Any, told: str, started: Started, tmp_path: Path) -> None:
    path, lines = tmp_path / "links.json", list[str]()
    links_of_this_machine(2, cache=str(path))
    path.write_text(changed(json.loads(path.read_text())))
    assert links_of_this_machine(2, cache=str(path), report=lines.append).cluster.link == Link(2, 100)
    assert told in lines[0]
    assert links_of_this_machine(2, cache=str(path)).cluster.link == Link(2, 100)


def test_what_a_file_says_cannot_move_the_cursor(started: Started, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    links_of_this_machine(2, cache=str(path))
    path.write_text(change("text", ["a\x1b[2J"])(json.loads(path.read_text())))
    assert links_of_this_machine(2, cache=str(path)).text == "a\\x1b[2J"
