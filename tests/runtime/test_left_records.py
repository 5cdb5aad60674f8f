"""What a rank leaves of its last step for `rota run`, and how that ends."""

import json
import re
import signal
from pathlib import Path

import pytest

from rota import Cluster, Costs, FormatError, Plan, place
from rota.cli.commands.run import _report_end
from rota.runtime.launcher_files import collect, leave_record
from rota.runtime.recorder import Record
from rota.schedules import gpipe


def plan(num_ranks: int = 3) -> Plan:
    """A step takes each rank 600 µs."""
    return gpipe(place(Costs.uniform(num_ranks, 100, 200), Cluster.uniform(num_ranks)), 2)


def records(*busy_us: int) -> list[Record]:
    return [
        Record(rank, 5, [7], [7 + 1000 * us], messages=[(0, 1, 5, 6)], reductions=[(2, 8, 9)])
        for rank, us in enumerate(busy_us)
    ]


def test_records_are_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_FOLDER", str(tmp_path))
    left = records(600, 600, 900)
    for record in left:
        assert collect(plan(), str(tmp_path)) == []
        leave_record(plan(), record)
    assert collect(plan(), str(tmp_path)) == left


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("starts_ns", ["x"], "starts_ns[0] is"),
        ("rank", 1, "rank is 1; expected 0"),
        ("messages", [[0, 0, 5]], "expected a list of length 4"),
        ("offset_ns", None, "offset_ns is null"),
    ],
)
def test_a_record_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object, told: str
) -> None:
    monkeypatch.setenv("ROTA_FOLDER", str(tmp_path))
    leave_record(plan(1), records(600)[0])
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(FormatError, match=re.escape(told)):
        collect(plan(1), str(tmp_path))


@pytest.mark.parametrize(
    ("ended_by", "code", "told"),
    [(None, 0, ""), (signal.SIGUSR1, 0, "SIGUSR1: all ranks have ended"), (signal.SIGTERM, 143, "SIGTERM: all ranks")],
)
def test_exit_code_after_a_request_to_end(
    ended_by: signal.Signals | None, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _report_end(ended_by) == code
    assert told in capsys.readouterr().err
