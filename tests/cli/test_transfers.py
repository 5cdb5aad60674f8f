"""A line says what a plan counts of its transfers, and `rota plan` takes measured links."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cli.test_cli import Capsys, printed, refused, run
from rota import Cluster, Costs, Link, PlacementError, Plan, SharedLink, calibration, place, simulate
from rota.cli.screen import FREE, transfers_text
from rota.schedules import one_f_one_b

HOST = SharedLink("host a", 40, (0, 1), (0, 1))


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        (Cluster.uniform(2), FREE),
        (Cluster.uniform(2, None, 5), "Included in the times: latency (5 µs)."),
        (
            Cluster((None, None), Link(5, 100), ((0, 1, Link(7, 50)),)),
            "Included in the times: latency (5 µs to 7 µs), rate (50 MB/s to 100 MB/s).",
        ),
        (
            Cluster((None, None), Link(5, 100), shared=(HOST,)),
            "Included in the times: latency (5 µs), rate (100 MB/s), host a (2 ranks share 40 MB/s).",
        ),
    ],
)
def test_what_a_plan_counts(cluster: Cluster, line: str) -> None:
    assert transfers_text(place(Costs.uniform(2, boundary_bytes=80), cluster)) == line


def test_nothing_is_said_where_nothing_is_sent() -> None:
    assert transfers_text(place(Costs.uniform(2), Cluster.uniform(1), (0, 0))) == ""


def test_measured_links_go_into_the_plan_and_are_told_by_every_command(tmp_path: Path, capsys: Capsys) -> None:
    cluster = Cluster((None, None), Link(5, 100), shared=(HOST,))
    links, plan = tmp_path / "cluster.json", tmp_path / "plan.json"
    links.write_text(cluster.to_json())
    step = ("--ranks", "2", "--microbatches", "4", "--boundary", "80")
    _, said, _ = run(capsys, "plan", "1f1b", *step, "--links", links, "--limit", "1GB", "-o", plan)
    assert "host a (2 ranks share 40 MB/s)" in said
    found = Plan.from_json(plan.read_text()).placement.cluster
    assert (found.shared, found.link) == (cluster.shared, cluster.link)
    assert found.limit_bytes == (10**9, 10**9)
    timeline = tmp_path / "timeline.json"
    measured = simulate(Plan.from_json(plan.read_text()))
    longer = measured.ends_us[0][-1] + 1
    timeline.write_text(
        replace(measured, ends_us=((*measured.ends_us[0][:-1], longer), *measured.ends_us[1:])).to_json()
    )
    commands = [(command, plan) for command in ("check", "explain")]
    commands += [("explain", timeline), ("compare", plan, timeline)]
    for command in (*commands, ("show", plan), ("show", timeline)):
        assert "host a (2 ranks share 40 MB/s)" in run(capsys, *command)[1]
    for command in (*commands, ("show", plan)):
        assert "host a (2 ranks share 40 MB/s)" in run(capsys, *command, "--json")[1]
    assert "latency (7 µs), rate (2 GB/s)" in run(capsys, "plan", "1f1b", *step, "--link", "7us,2GB/s")[1]
    assert "host a (2 ranks share 40 MB/s)" in run(capsys, "plan", "gpipe", *step, "--links", plan)[1]  # its links


@pytest.mark.parametrize("schedule", ["1f1b", "search"])
def test_free_transfers_are_in_the_first_line(capsys: Capsys, schedule: str) -> None:
    step = ("plan", schedule, "--ranks", "2", "--microbatches", "2")
    assert run(capsys, *step)[1].startswith("Transfers are counted as free; give --link or --links ")
    assert "counted as free" not in run(capsys, *step, "--link", "5us")[1]
    assert "counted as free" not in run(capsys, "plan", "1f1b", "--ranks", "1", "--microbatches", "2")[1]


def test_costs_of_a_run_are_planned_with_its_links(tmp_path: Path, capsys: Capsys) -> None:
    placement = place(Costs.uniform(2, boundary_bytes=80), Cluster((None, None), Link(5, 100), shared=(HOST,)))
    measured, costs, output = (tmp_path / name for name in ("measured.json", "costs.json", "better.json"))
    measured.write_text(simulate(one_f_one_b(placement, 4)).to_json())
    said = printed(capsys, "calibrate", measured, "--costs", costs, "-o", output)
    (command,) = re.findall(r"plan with `rota plan … (.*)`", " ".join(said.split()))
    assert command == f"--costs {costs} --links {output}"
    for links in (measured, output):
        planned = run(capsys, "plan", "1f1b", "--microbatches", "4", "--costs", costs, "--links", links)[1]
        assert "host a (2 ranks share 40 MB/s)" in " ".join(planned.split())
    measured.write_text(simulate(one_f_one_b(place(Costs.uniform(2), Cluster.uniform(2)), 4)).to_json())
    said = run(capsys, "calibrate", measured, "--costs", costs, "--force")[1]
    assert re.search(r"plan with `rota plan … --costs [^ ]*`", " ".join(said.split()))  # it had no links


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--ranks", "3", "--links"), "has 2 ranks, but the plan has 3; measure the links between 3 ranks"),
        (("--ranks", "2", "--link", "5us", "--links"), "has all links; leave --link out"),
    ],
)
def test_links_that_do_not_fit_are_refused(tmp_path: Path, capsys: Capsys, options: tuple[str, ...], told: str) -> None:
    links = tmp_path / "cluster.json"
    links.write_text(Cluster.uniform(2).to_json())
    assert told in refused(capsys, 2, "plan", "1f1b", "--microbatches", "4", *options, links)


def test_snapshots_that_costs_count_are_planned_and_kept(tmp_path: Path, capsys: Capsys) -> None:
    """Two copies of parameters and an optimizer's state, of 1 MB each."""
    costs, output = tmp_path / "costs.json", tmp_path / "plan.json"
    counted = Costs.uniform(2, 100, 200, static_bytes=3_000_000, state_bytes=2_000_000).with_snapshots()
    costs.write_text(counted.to_json())
    step = ("--microbatches", "4", "--costs", costs)
    assert run(capsys, "plan", "1f1b", *step, "--limit", "6MB")[0] == 1
    assert run(capsys, "plan", "1f1b", *step, "--limit", "8MB", "-o", output)[0] == 0
    placement = Plan.from_json(output.read_text()).placement
    assert placement.snapshot_bytes == calibration.costs_of(placement).snapshot_bytes == (4_000_000, 4_000_000)
    alone = place(counted, Cluster.uniform(1), ranks=(0, 0))
    assert (alone.static_bytes, alone.state_bytes, alone.snapshot_bytes) == ((14_000_000,), (4_000_000,), (8_000_000,))
    with pytest.raises(PlacementError, match="measure them again"):
        Costs.uniform(2).with_snapshots()
