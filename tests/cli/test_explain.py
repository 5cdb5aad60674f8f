"""`rota explain`, `rota import trace`, traces by `rota show`, and colour."""

import json
import random
import sys
from pathlib import Path

import pytest

from cli.test_cli import Capsys, printed, run
from rota import Cluster, Costs, Plan, Timeline, explain, place, schedules, simulate
from rota.cli.screen import transfers_text
from support.measured import measured_like

PLAN = schedules.one_f_one_b(place(Costs((100, 140), (200, 280)), Cluster.uniform(2, latency_us=9)), 4)
COUNTED = f"\n{transfers_text(PLAN.placement)}\n"
MEASURED = measured_like(PLAN, random.Random(1), longest_us=300)


@pytest.fixture
def measured_file(tmp_path: Path) -> Path:
    path = tmp_path / "measured.json"
    path.write_text(MEASURED.to_json())
    return path


def test_explain_says_why_against_the_timelines_own_plan(measured_file: Path, capsys: Capsys) -> None:
    out = printed(capsys, "explain", measured_file)
    assert out == explain(MEASURED, PLAN).to_text() + COUNTED
    assert "slower" in out
    assert run(capsys, "explain", measured_file, "--cores", 1)[1] == explain(MEASURED, PLAN, 1).to_text() + COUNTED


def test_which_step_a_measured_timeline_has_is_told(measured_file: Path, tmp_path: Path, capsys: Capsys) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(PLAN.to_json())
    told = f"{measured_file} has one step (the last one, if `rota run` wrote it); other steps may differ\n"
    assert run(capsys, "explain", measured_file)[2] == f"rota explain: {told}"
    assert run(capsys, "compare", plan, measured_file)[2] == f"rota compare: {told}"
    assert run(capsys, "explain", plan)[2] == ""


def test_calibrate_writes_what_it_says(tmp_path: Path, capsys: Capsys) -> None:
    timeline, better = tmp_path / "measured.json", tmp_path / "better.json"
    timeline.write_text(simulate(PLAN).to_json())
    _, out, _ = run(capsys, "calibrate", timeline, "--plan", "1f1b", "-o", better)
    assert "Keep the plan's orders: none of 1 other plan is 1% faster." in out
    assert out.endswith(f"Wrote {better}: the same order of ops, with the measured costs.\n")
    assert Plan.from_json(better.read_text()).orders == PLAN.orders


@pytest.mark.parametrize("columns", [60, 45])
def test_fits_the_terminal(columns: int, measured_file: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    _, wide, _ = run(capsys, "explain", measured_file, "--cores", 1)
    monkeypatch.setenv("COLUMNS", str(columns))
    _, narrow, _ = run(capsys, "explain", measured_file, "--cores", 1)
    assert max(map(len, wide.splitlines())) > columns
    assert max(map(len, narrow.splitlines())) <= columns
    assert {*wide.split()} == {*narrow.split()}


def test_explain_takes_a_plan_and_another_timeline(measured_file: Path, tmp_path: Path, capsys: Capsys) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(PLAN.to_json())
    assert run(capsys, "explain", plan)[1] == explain(PLAN).to_text() + COUNTED
    fields = json.loads(printed(capsys, "explain", measured_file, "--planned", measured_file, "--json"))
    assert fields["idle_us"] == list(MEASURED.idle_us)
    assert "slower" not in fields["by_cause_us"]


def test_a_trace_is_imported_explained_and_kept(tmp_path: Path, capsys: Capsys) -> None:
    path, output = tmp_path / "trace.json", tmp_path / "timeline.json"
    names = (
        ("PP:0F0", 0, 5),
        ("PP:0F1", 6, 9),
        ("PP:0B0", 9, 19),
        ("PP:0B1", 20, 31),
        ("Optimizer.step#SGD.step", 33, 34),
    )
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": end - start}
        for name, start, end in names
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    out = printed(capsys, "import", "trace", path, "-o", output)
    assert out.startswith("step 0 of 1 (counted from 0): 1 rank, 1 stage, 2 micro-batches\nclocks as recorded")
    timeline = Timeline.from_json(output.read_text())
    assert timeline.starts_us == ((0, 6, 9, 20),)
    assert timeline.makespan_us == 34
    assert explain(timeline, timeline.plan).to_text() in out
    assert "The result was not saved" in run(capsys, "import", "trace", path)[1]


@pytest.mark.parametrize(
    ("terminal", "no_color", "term", "colored"),
    [
        (True, None, "xterm", True),
        (True, "1", "xterm", False),
        (True, None, "dumb", False),
        (False, None, "xterm", False),
    ],
)
def test_color_where_there_is_one_and_the_user_did_not_say_no(
    terminal: bool,
    no_color: str | None,
    term: str,
    colored: bool,
    measured_file: Path,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    assert ("\x1b[" in run(capsys, "show", measured_file)[1]) == colored
