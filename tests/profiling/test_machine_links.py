"""Links of this machine: measured once, then kept for as long as they hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from rota import Cluster, Link, PipelineError
from rota.profiling import links_of_this_machine, machine_links
from rota.profiling.links import MeasuredLinks, Report


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


def test_without_time_links_are_not_measured_but_those_that_are_kept_are_found(
    started: Started, tmp_path: Path
) -> None:
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


def test_by_default_links_are_in_the_users_cache(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
