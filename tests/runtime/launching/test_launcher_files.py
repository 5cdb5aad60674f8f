"""Where a script's plan comes from, what is run of it, and the folder of a run."""

import inspect
import json
import re
import signal
import sys
import traceback
from pathlib import Path

import pytest

from rota import Cluster, Costs, FormatError, PipelineError, Plan, given_plan, place
from rota.cli.commands.run import _report_end
from rota.runtime.launcher_files import collect, is_restart, keep_script, kept_script, leave_record, write_plan
from rota.runtime.launching import worker
from rota.runtime.launching.run_folder import run_folder
from rota.runtime.recorder import Record
from rota.schedules import gpipe, one_f_one_b

PLAN = one_f_one_b(place(Costs.uniform(4, 100, 200), Cluster.uniform(4)), 8)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ROTA_FOLDER", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "given.json"
    path.write_text(PLAN.to_json())
    return path


def test_what_the_launcher_left_goes_before_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = one_f_one_b(PLAN.placement, 4)
    for name, value in write_plan(other, str(file.parent)).items():
        monkeypatch.setenv(name, value)
    assert given_plan() == given_plan(file) == other


@pytest.mark.parametrize("size", [None, 4, 8])
def test_without_the_launcher_it_is_the_files(file: Path, monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", str(size))
    assert given_plan(str(file)) == PLAN


def test_what_cannot_be_had_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match=r"rota run plan.json script.py`, or name the plan's file for torchrun"):
        given_plan()
    with pytest.raises(FormatError, match=r"cannot read nowhere.json"):
        given_plan("nowhere.json")
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(PipelineError, match=r"given.json is for 4 ranks, but 6 processes were started; start 4, or a "):
        given_plan(file)


@pytest.mark.parametrize("name", ["ROTA_RESTART", "TORCHELASTIC_RESTART_COUNT"])
def test_a_restart_is_known(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("ROTA_RESTART", raising=False)
    monkeypatch.setenv(name, "0")
    assert not is_restart()
    monkeypatch.setenv(name, "2")
    assert is_restart()


SCRIPT = '''"""Words."""
import pickle, sys
assert __name__ == "__main__" and __doc__ == "Words."
def halve(number):
    return number / 0  # on purpose
assert pickle.loads(pickle.dumps(halve)) is halve
print(__file__, vars().get("annotations"))
halve(1)
'''


def test_a_changed_file_changes_neither_the_script_nor_its_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    Path("train.py").write_text(SCRIPT)
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("ROTA_FOLDER", str(tmp_path / "folder"))
    keep_script("train.py", str(tmp_path / "folder"))
    Path("train.py").write_text("exit('changed')\n")
    with pytest.raises(ZeroDivisionError) as error:
        worker._run("train.py", kept_script())
    assert capsys.readouterr().out == "train.py None\n"  # and no future import of the worker's
    told = "".join(traceback.format_exception(error.value))
    assert 'File "train.py", line 5, in halve\n    return number / 0  # on purpose\n' in told
    assert inspect.getsource(sys.modules["__main__"].halve).startswith("def halve(number):\n    return number / 0")


def test_what_a_killed_run_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """But not the folder of one that still runs, nor what is not Rota's."""
    left = ["rota-run-left", "rota-run-link", "another"]
    for name in (left[0], left[2]):
        (tmp_path / name / "0").mkdir(parents=True)
    (tmp_path / left[1]).symlink_to(tmp_path / "another")
    with run_folder("rota-run-", str(tmp_path)) as folder:
        path = Path(folder.path)
        assert path.stat().st_mode & 0o777 == 0o700
        with run_folder("rota-run-", str(tmp_path)):
            assert path.is_dir()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*left[1:], path.name])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(left[1:])
    assert (tmp_path / "another" / "0").is_dir()


def test_a_place_for_snapshots_that_is_none_is_told() -> None:
    told = "the folder of the run cannot be made in /nowhere: No such file or directory; choose another place with --sn"
    with pytest.raises(PipelineError, match=told), run_folder("rota-run-", "/nowhere"):
        pass


# --- what a rank leaves of its last step for `rota run`, and how that ends --------------------------------------------


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
def test_record_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object, told: str) -> None:
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
