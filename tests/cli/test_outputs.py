"""Where commands write: nothing is lost without --force, and no file is there in half."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.test_cli import Capsys, printed, refused, run
from planning.test_autoplan import UNEVEN, layer_costs
from rota import Curve, Plan, Profile, SizeModel, Timeline, check
from rota.cli import main
from rota.core.writing import whole_file, write_text


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rota(capsys: Capsys, command: str) -> tuple[int, str]:
    """Exit code and standard error."""
    return main(command.split()), capsys.readouterr().err


PLAN = "plan 1f1b --ranks 3 --microbatches 4 -o plan.json"


@pytest.fixture
def files(capsys: Capsys) -> None:
    """plan.json, planned.json, and measured.json, in which everything takes longer."""
    assert rota(capsys, PLAN)[0] == 0
    assert rota(capsys, "show plan.json --timeline planned.json")[0] == 0
    planned = Timeline.from_json(Path("planned.json").read_text())
    times = [
        tuple(tuple(2 * us for us in row) for row in getattr(planned, name))
        for name in ("starts_us", "ends_us", "sent_us", "arrived_us")
    ]
    Path("measured.json").write_text(Timeline(planned.plan, *times).to_json())


@pytest.mark.parametrize(
    "command",
    [
        "plan gpipe --ranks 2 --microbatches 2 -o there.json",
        "show plan.json --timeline there.json",
        "compare plan.json measured.json -o there.svg",
        "run --timeline there.json plan.json train.py",
        "import trace trace.json -o there.json",
        "checkpoint export run -o there.safetensors",
        "demo -o there",
        "calibrate measured.json --costs there.json",
    ],
)
@pytest.mark.usefixtures("files")
def test_what_is_there_is_written_over_by_force_alone(command: str, capsys: Capsys) -> None:
    name = next(word for word in command.split() if word.startswith("there"))
    path = Path(name, "kept.txt") if name == "there" else Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    error = refused(capsys, 2, *command.split())
    force = "--force (before the plan)" if command.startswith("run") else "--force"
    assert f"{name} already exists; give another name, or {force} to overwrite it" in error
    assert path.read_text() == "precious"
    if command.startswith(("plan", "show", "compare")):
        assert rota(capsys, f"{command} --force")[0] == 0
        assert not path.read_bytes().startswith(b"precious")
    assert not list(Path().glob(".*"))


@pytest.mark.parametrize(
    "command",
    [
        "autoplan model.py --ranks 2 --batch 2 -o PLACE/x.json",
        "show plan.json --bound -o PLACE/x.html",
        "calibrate measured.json --costs PLACE/x.json",
        "plan search --frontier --ranks 2 -o PLACE/x.png",
        "import trace trace.json -o PLACE/x.json",
        "export megatron plan.json -o PLACE/x.txt",
        "checkpoint export run -o PLACE/x.safetensors",
    ],
)
@pytest.mark.parametrize("place", ["absent", "plan.json"])
@pytest.mark.usefixtures("files")
def test_a_place_that_cannot_be_written_is_refused_before_any_work(command: str, place: str, capsys: Capsys) -> None:
    """Before the files are read, of which some are not there."""
    before = sorted(os.listdir())
    assert f"cannot write {place}/x." in refused(capsys, 2, *command.replace("PLACE", place).split())
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    "command", ["demo -o plan.json/x", "export torchtitan plan.json --model m.py:f -o plan.json/x"]
)
@pytest.mark.usefixtures("files")
def test_a_folder_that_cannot_be_made_is_refused(command: str, capsys: Capsys) -> None:
    assert "cannot make the folder plan.json/x: " in refused(capsys, 2, *command.split())


@pytest.mark.usefixtures("files")
def test_force_does_not_write_over_what_the_command_reads(capsys: Capsys) -> None:
    before = Path("plan.json").read_text()
    assert "is read by the command" in refused(capsys, 2, "show", "plan.json", "--force", "-o", "plan.json")
    assert Path("plan.json").read_text() == before


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("plan 1f1b --ranks 3 --microbatches 4 -o plan.html", "not as plan.html; `rota show` draws pictures"),
        ("show plan.json --timeline x.csv", "a timeline is written as .json, not as x.csv; `rota show` draws pictures"),
        ("import trace trace.json -o x.html", "a timeline is written as .json, not as x.html"),
        ("compare measured.json plan.json", "give the plan first, as in `rota compare plan.json measured.json`"),
        (f"show plan.json --timeline {'x' * 300}.json", "File name too long"),
    ],
)
@pytest.mark.usefixtures("files")
def test_the_right_command_is_told(command: str, told: str, capsys: Capsys) -> None:
    before = sorted(os.listdir())
    assert told in refused(capsys, 2, *command.split())
    assert sorted(os.listdir()) == before


@pytest.mark.usefixtures("files")
def test_two_measured_timelines_are_compared_with_a_word(capsys: Capsys) -> None:
    one_step = (
        "rota compare: measured.json has one step (the last one, if `rota run` wrote it); other steps may differ\n"
    )
    assert rota(capsys, "compare plan.json measured.json") == (0, one_step)
    Path("before.json").write_text(Path("measured.json").read_text())
    code, error = rota(capsys, "compare before.json measured.json")
    as_planned = "rota compare: before.json has measured times, which are treated as planned\n"
    assert (code, error) == (0, as_planned + one_step)


def cut_off() -> None:
    with whole_file("plan.json") as partial:
        partial.write_text("ha")
        raise KeyboardInterrupt


def test_what_is_cut_off_leaves_the_file_as_it_was() -> None:
    write_text("plan.json", "whole")
    with pytest.raises(KeyboardInterrupt):
        cut_off()
    assert Path("plan.json").read_text() == "whole"
    assert os.listdir() == ["plan.json"]


def test_links_are_followed_and_modes_are_the_usual_ones() -> None:
    Path("folder").mkdir()
    Path("link.json").symlink_to("folder/plan.json")
    write_text("link.json", "é")
    assert Path("link.json").is_symlink()
    assert Path("folder/plan.json").read_text(encoding="utf-8") == "é"
    (usual := Path("usual")).touch()
    assert Path("folder/plan.json").stat().st_mode == usual.stat().st_mode


@pytest.mark.usefixtures("files")
def test_two_things_do_not_go_into_one_file(capsys: Capsys) -> None:
    command = "calibrate measured.json -o a.json --costs ./a.json --force"
    told = "rota calibrate: error: a.json is given for two outputs; the second would overwrite the first\n"
    assert refused(capsys, 2, *command.split()) == told
    assert not Path("a.json").exists()


@pytest.mark.parametrize("nobody_reads", [True, False])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("show plan.json --timeline written.json", 0),
        ("check refused.csv", 1),  # nothing is written, and the exit code is that of the check
    ],
)
@pytest.mark.usefixtures("files")
def test_a_command_does_its_work_when_what_it_prints_is_lost(command: str, code: int, nobody_reads: bool) -> None:
    """Because the reader has ended, or the device is full: then, the exit code is 1, and the last line says why."""
    Path("refused.csv").write_text("0B0,0F0\n")
    reader, writer = os.pipe() if nobody_reads else (os.open(os.devnull, 0), os.open("/dev/full", os.O_WRONLY))
    os.close(reader)
    ended = subprocess.run([sys.executable, "-m", "rota", *command.split()], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    lost = code == 0 and not nobody_reads
    assert (ended.returncode, b"Broken" in ended.stderr) == (1 if lost else code, False), ended.stderr
    assert b"Traceback" not in ended.stderr
    assert (b"rota: error: cannot write standard output: No space left" in ended.stderr) is lost
    assert Path("written.json").exists() == (code == 0)


# --- exit codes: 2 for arguments and files that must be changed first, 1 for what was tried and refused or failed -----


_PLAN = "--ranks 2 --microbatches 4 --activation 1GB --limit 500MB"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile, the sizes of stages, and lengths of samples."""
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text(Profile((layer_costs(1, UNEVEN),)).to_json())
    curve = Curve(60, 0.02, 4e-6)
    Path("sizes.json").write_text(SizeModel((curve,), (curve,), activation_bytes=(Curve(0, 1000),)).to_json())
    Path("lengths.json").write_text(json.dumps([130, 85]))
    return tmp_path


@pytest.mark.usefixtures("folder", "time_is_work")
@pytest.mark.parametrize(
    ("command", "told"),
    [
        (f"plan 1f1b {_PLAN}", "over its limit of 500 MB"),
        (f"plan search {_PLAN}", "rank 0 needs at least 1000000000 bytes"),
        (f"plan search {_PLAN} --objective period", "rank 0 needs at least 1000000000 bytes"),
        ("plan-batch sizes.json lengths.json --limit 100kB", "sample 0 of length 130 fits in no micro-batch"),
        ("autoplan --profile profile.json --ranks 2 --batch 8 --memory 1B --time-limit 600", "found nothing that fits"),
    ],
)
def test_what_does_not_fit_in_memory_is_a_failure(command: str, told: str, capsys: Capsys) -> None:
    assert told in refused(capsys, 1, *command.split())


LENGTHS = [[130, 85, 2300, 410, 77, 1200, 96], [500, 400]]


@pytest.fixture
def sizes(tmp_path: Path) -> Path:
    path = tmp_path / "sizes.json"
    forward, backward = Curve(60, 0.02, 4e-6), Curve(120, 0.04, 8e-6)
    path.write_text(SizeModel((forward,) * 3, (backward,) * 3, activation_bytes=(Curve(0, 1000),) * 3).to_json())
    return path


def test_each_batch_gets_its_plan(sizes: Path, tmp_path: Path, capsys: Capsys) -> None:
    lengths, folder = tmp_path / "lengths.json", tmp_path / "plans"
    lengths.write_text(json.dumps(LENGTHS))
    out = printed(capsys, "plan-batch", sizes, lengths, "--limit", "40MB", "-o", folder)
    assert "batch 0: 7 samples" in out
    assert "all orders of this grouping" in out
    for i in range(2):
        plan = Plan.from_json((folder / f"batch{i}.json").read_text())
        check(plan)
        assert plan.placement.cluster.limit_bytes == (40_000_000,) * 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[130], [85, 50000]]", "lengths.json, batch 1: sample 1 of length 50000"),
        ('[130, "long"]', "expected the lengths of a batch as whole numbers, such as [130, 85, 2300]"),
    ],
)
def test_lengths_that_cannot_be_planned(text: str, told: str, sizes: Path, tmp_path: Path, capsys: Capsys) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text(text)
    code, _, error = run(capsys, "plan-batch", sizes, lengths, "--limit", "40MB")
    assert code != 0
    assert told in error
