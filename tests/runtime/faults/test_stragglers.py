"""Who is slower than planned, step after step."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from rota import Cluster, Costs, FormatError, Plan, place
from rota.calibration import calibrate
from rota.cli.commands.run import _report_end
from rota.runtime.faults.stragglers import Straggler, stragglers
from rota.runtime.launcher_files import collect, last_plan, leave_record
from rota.runtime.launching.launch import Run
from rota.runtime.recorder import Record
from rota.schedules import gpipe, one_f_one_b
from rota.usage import Usage
from support.measured import timed


def plan(num_ranks: int = 3) -> Plan:
    """A step takes each rank 600 µs."""
    return gpipe(place(Costs.uniform(num_ranks, 100, 200), Cluster.uniform(num_ranks)), 2)


def records(*busy_us: list[int]) -> list[Record]:
    found = []
    for rank, steps in enumerate(busy_us):
        record = Record(rank)
        for us in steps:
            record.starts_ns, record.ends_ns = [7], [7 + 1000 * us]
            record.busy_ns.append(1000 * us)
        found.append(record)
    return found


def test_a_rank_that_is_slower_in_most_steps() -> None:
    found = stragglers(plan(), records([600] * 21, [600] * 21, [600] * 3 + [786] * 18))
    assert found == [Straggler(2, 1.31, 1.0, 18, 20)]
    assert found[0].to_text() == (
        "rank 2 was slower than the median of the other ranks in 18 of the last 20 steps: its ops took 1.31 times as "
        "long as planned, theirs 1.00 times"
    )


@pytest.mark.parametrize(
    "busy_us",
    [
        [[600] * 21, [700] * 21, [650] * 21],  # not by much
        [[9000] * 21, [9100] * 21, [9000] * 21],  # all alike: the plan's costs were guesses
        [[600] * 21, [600, 900] * 10, [600] * 21],  # now and then
        [[600] * 5, [900] * 5, [600] * 5],  # four steps beside the first one
        [[600] * 21, [600] * 21],  # one rank has left no record
        [],
    ],
)
def test_nobody_is(busy_us: list[list[int]]) -> None:
    assert stragglers(plan(), records(*busy_us)) == []


def test_nobody_is_where_ranks_share_cores() -> None:
    """Two of three ranks run at a time: whoever waits for a core takes longer than planned, step after step."""
    slow = records([600] * 21, [600] * 21, [900] * 21)
    for num_cores, found in ((2, []), (3, [2]), (None, [2])):
        for record in slow:
            record.num_cores = num_cores
        assert [straggler.rank for straggler in stragglers(plan(), slow)] == found


def test_the_first_step_does_not_count() -> None:
    assert stragglers(plan(), records([600] * 6, [90_000] + [600] * 5, [600] * 6)) == []
    assert len(stragglers(plan(), records([600] * 6, [600] + [900] * 5, [600] * 6))) == 1


def test_one_rank_has_nobody_to_be_slower_than() -> None:
    assert stragglers(plan(1), records([9000] * 21)) == []


def test_records_are_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_FOLDER", str(tmp_path))
    for record in records([600] * 30, [600] * 30, [900] * 30):
        assert collect(plan(), str(tmp_path)) == []
        leave_record(plan(), record)
    (found,) = stragglers(plan(), collect(plan(), str(tmp_path)))
    assert (found.rank, found.num_slow, found.num_steps) == (2, 20, 20)


def test_a_record_of_another_order_is_handed_over_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_FOLDER", str(tmp_path))
    other = one_f_one_b(plan().placement, 2)
    assert last_plan(plan(), str(tmp_path)) == plan()
    for record in records([600], [600], [600]):
        leave_record(plan(), record, other)
    assert len(collect(plan(), str(tmp_path))) == 3
    assert last_plan(plan(), str(tmp_path)) == other
    assert last_plan(plan(), str(tmp_path), restart=1) == plan()


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("starts_ns", ["x"], "starts_ns[0] is"),
        ("rank", 1, "rank is 1; expected 0"),
        ("messages", [[0, 0, 5]], "expected 4 numbers"),
        ("offset_ns", None, "offset_ns is null"),
    ],
)
def test_a_record_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object, told: str
) -> None:
    monkeypatch.setenv("ROTA_FOLDER", str(tmp_path))
    leave_record(plan(1), records([600])[0])
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(FormatError, match=re.escape(told)):
        collect(plan(1), str(tmp_path))


def test_the_command_tells_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    slow = [Straggler(2, 1.31, 1.0, 18, 20)]
    assert _report_end(Run(None, slow, None), plan(), "t.json") == 0
    assert "plan with measured costs: rota calibrate t.json -o better.json" in capsys.readouterr().err
    assert _report_end(Run(None, slow, signal.SIGUSR1), plan(), None) == 0
    assert "measure with --timeline measured.json, and plan with" in capsys.readouterr().err
    assert _report_end(Run(None, [], signal.SIGTERM), plan(), None) == 143


def test_a_plan_with_the_times_of_a_run_is_not_calibrated_by_one_again(capsys: pytest.CaptureFixture[str]) -> None:
    measured = timed(plan(), lambda op: 150 if op.stage == 2 else 100)
    calibrated = calibrate([replace(measured, plan=replace(plan(), usage=Usage(("a", "b"), 1)))]).chosen
    calibrated = Plan.from_json(calibrated.to_json())
    _report_end(Run(None, [Straggler(2, 1.31, 1.0, 18, 20)], None), calibrated, "t.json")
    told = capsys.readouterr().err
    assert "the plan's times were measured in a run, in 1 recorded step: either this rank was faster then" in told
    assert "rota calibrate t.json" not in told


@pytest.mark.parametrize(("other_us", "is_advised"), [(280, True), (50, False)])
def test_ops_that_differ_as_much_as_the_rank_is_slower_are_no_reason_to_calibrate(
    other_us: int, is_advised: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of ops that take 100 µs by plan, half take 300 µs, and the others 280 or 50."""
    planned = gpipe(place(Costs.uniform(3, 100, 100), Cluster.uniform(3)), 8)
    last = timed(planned, lambda op: 300 if op.microbatch % 2 else other_us)
    _report_end(Run(last, [Straggler(2, 1.31, 1.0, 18, 20)], None), planned, "t.json")
    assert ("rota calibrate t.json" in capsys.readouterr().err) is is_advised
