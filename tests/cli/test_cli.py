"""The command line in one process: files between commands, exit codes, one-line errors."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest

import rota
from rota import Cluster, Costs, Plan, Timeline, place, simulate
from rota.cli import main
from rota.cli.common import parse_bytes
from rota.cli.main import COMMANDS
from rota.interop.torch_order import derived
from rota.schedules import FAMILIES, NAMED
from support import ROOT
from support.model_file import MODEL
from support.parsing import ALL

Capsys = pytest.CaptureFixture[str]


def run(capsys: Capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def printed(capsys: Capsys, *arguments: object) -> str:
    """What a command prints that does its work."""
    code, out, error = run(capsys, *arguments)
    assert code == 0, error
    return out


def refused(capsys: Capsys, code: int, *arguments: object) -> str:
    """What a command says that does not: one line."""
    ended, _, error = run(capsys, *arguments)
    assert (ended, error.count("\n")) == (code, 1), error
    return error


@pytest.fixture
def plan_file(tmp_path: Path, capsys: Capsys) -> Path:
    path = tmp_path / "plan.json"
    assert run(capsys, "plan", "1f1b", "--ranks", 3, "--microbatches", 4, "-o", path)[0] == 0
    return path


def test_check_proves_the_order_on_devices(plan_file: Path, capsys: Capsys) -> None:
    out = printed(capsys, "check", plan_file, "--device")
    # 24 ops, 16 messages with two sides each, and a reduction per stage.
    assert "59 kernels on 3 ranks with 4 channels" in out
    assert "have no cycle of waits, and both sides of each communicator enqueue in the same order" in out
    assert "up to 6 kernels can be on a device at once, one per stream: say how many multiprocessors it has" in out
    assert run(capsys, "check", plan_file)[1] in out


def test_check_compares_the_kernels_at_once_with_a_device(plan_file: Path, capsys: Capsys) -> None:
    for device, most in ("H100", 22), ("6", 1):
        out = printed(capsys, "check", plan_file, "--sms", device)
        assert "59 kernels on 3 ranks" in out
        assert f"up to 6 kernels can be on a device at once, one per stream: if each has at most {most} CTA" in out
    error = refused(capsys, 1, "check", plan_file, "--sms", "5")
    assert "refused: up to 6 kernels can be on a device at once, one per stream, but it has 5" in error
    error = refused(capsys, 2, "check", plan_file, "--sms", "0")
    assert "'0' is neither a number of multiprocessors nor one of a100-40gb" in error


def test_check_proves_the_order_on_pytorch_s_engine(plan_file: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = printed(capsys, "check", plan_file, "--torch")
    # 24 ops, and 16 messages with two sides each.
    assert "with the messages that it derives: 56 kernels on 3 ranks with 4 channels have no cycle of waits" in out
    assert "PyTorch sends messages in a different order from the plan" in out
    assert "defer_pp_recv=True could hang or swap messages; leave it off: where each pair of ranks has a comm" in out
    plan = Plan.from_json(plan_file.read_text())
    (tmp_path / "blocks.csv").write_text(derived(plan.to_csv(), defers_receives=True))
    error = refused(capsys, 1, "check", tmp_path / "blocks.csv", "--torch")
    assert "blocks.csv: where each pair of ranks has a communicator" in error


def test_plan_show_and_compare_pass_files_on(
    plan_file: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = tmp_path / "timeline.json"
    assert run(capsys, "check", plan_file)[0] == 0
    assert run(capsys, "show", plan_file, "--timeline", timeline)[0] == 0
    assert Timeline.from_json(timeline.read_text()) == simulate(Plan.from_json(plan_file.read_text()))
    monkeypatch.setenv("COLUMNS", "70")
    for file in (plan_file, timeline):
        out = printed(capsys, "show", file)
        assert "rank 2" in out
        assert max(map(len, out.splitlines())) <= 70
    picture = tmp_path / "plan.png"
    assert run(capsys, "show", timeline, "-o", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "nothing was measured" in refused(capsys, 2, "compare", plan_file, timeline)
    simulated = simulate(Plan.from_json(plan_file.read_text()))
    names = ("starts_us", "ends_us", "sent_us", "arrived_us", "step_ends_us")
    times = {name: tuple(tuple(2 * us for us in row) for row in getattr(simulated, name)) for name in names}
    timeline.write_text(replace(simulated, **times).to_json())
    for command in (["show", timeline, "--above", plan_file], ["compare", plan_file, timeline]):
        page = tmp_path / f"{command[0]}.html"
        assert run(capsys, *command, "-o", page)[0] == 0
        assert "plan.json over timeline.json" in page.read_text()
    assert "name one with -o" in refused(capsys, 2, "show", timeline, "--above", plan_file)
    printed(capsys, "show", plan_file, "--bound", "-o", tmp_path / "bound.html")
    assert "proven optimal" in (tmp_path / "bound.html").read_text()
    assert "slower ops" in printed(capsys, "compare", plan_file, timeline)


def test_csv_is_written_and_read(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "plan.csv"
    arguments = ["--stages", 4, "--ranks", 2, "--microbatches", 3, "-o", path]
    assert run(capsys, "plan", "gpipe", *arguments)[0] == 0
    assert path.read_text().startswith("0F0,0F1,0F2,2F0")
    out = printed(capsys, "check", path)
    assert "4 stages and 3 micro-batches on 2 ranks" in out
    assert re.search(r"^  makespan \d+ times a forward \(F\), if B takes twice as long as F.*$", out, re.MULTILINE)
    assert "these times are assumed, because a schedule CSV has none; give your own with --costs costs.json" in out
    assert "µs" not in out


def test_times_of_a_csv_are_assumed_or_given(tmp_path: Path, capsys: Capsys) -> None:
    path, costs, timeline = tmp_path / "plan.csv", tmp_path / "costs.json", tmp_path / "timeline.json"
    given = Costs(forward_us=(5, 7, 6, 8), backward_us=(11, 13, 12, 14))
    costs.write_text(given.to_json())
    assert run(capsys, "plan", "interleaved_1f1b", "--stages", 4, "--ranks", 2, "--microbatches", 4, "-o", path)[0] == 0
    commands = [["check", path], ["show", path], ["explain", path]]
    for command in commands:
        code, out, err = run(capsys, *command, "--json")
        assert (code, json.loads(out)["times_assumed"]) == (0, True)
        assert f"{path} has no times; Rota assumes 1 ms for F, 2 ms for B, and" in err
        assert f"to use your own times, run `rota show {path} --costs costs.json --timeline timeline.json`" in err
    assert "has no times" in run(capsys, "show", path)[2]
    assert run(capsys, "show", path, "--costs", costs, "--timeline", timeline)[0] == 0
    read = Timeline.from_json(timeline.read_text())
    placement = place(given, Cluster.uniform(2), [0, 1, 0, 1])
    assert read.makespan_us == simulate(Plan.from_csv(path.read_text(), placement)).makespan_us < 1000
    for command in (["check", path, "--costs", costs], ["show", timeline]):
        code, out, err = run(capsys, *command, "--json")
        fields = json.loads(out)
        assert (code, err, fields["times_assumed"], fields["makespan_us"]) == (0, "", False, read.makespan_us)
    assert "has costs of its own; leave --costs out" in refused(capsys, 2, "show", timeline, "--costs", costs)
    costs.write_text(Costs.uniform(3).to_json())
    error = refused(capsys, 2, "check", path, "--costs", costs)
    assert "the CSV has 4 stages, but --costs has costs for 3; give the costs of every stage" in error


#: As `rota.profile` makes them: edges always, weight_us never.
MEASURED = Costs(
    forward_us=(50, 70, 60, 50),
    backward_us=(110, 130, 120, 110),
    activation_bytes=(8, 9, 8, 7),
    boundary_bytes=(10, 20, 30),
    gradient_bytes=(10, 20, 30),
    edges=((0, 1), (1, 2), (2, 3)),
)


@pytest.fixture
def costs_file(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(MEASURED.to_json())
    return path


def test_a_profile_given_for_costs_is_told_where_it_belongs(costs_file: Path, capsys: Capsys) -> None:
    costs_file.write_text('{"rota": "profile"}')
    error = refused(capsys, 2, "plan", "1f1b", "--costs", costs_file, "--microbatches", 8)
    told = "a profile of layers is for `rota autoplan --profile`, which makes stages of them); give what `rota cal"
    assert told in error


def test_schedules_compares_all_on_measured_costs(costs_file: Path, capsys: Capsys) -> None:
    out = printed(capsys, "plan", "all", "--costs", costs_file, "--microbatches", 8, "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows.keys() == NAMED.keys() - {"forward_only", "seq1f1b"}
    assert {row["problem"] for row in rows.values()} == {""}
    assert rows["1f1b"]["makespan_us"] == simulate(NAMED["1f1b"](place(MEASURED, Cluster.uniform(4)), 8)).makespan_us


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.stages_per_rank == 1 and f.name != "seq1f1b"])
def test_what_measured_costs_lack_is_assumed_and_told(name: str, costs_file: Path, capsys: Capsys) -> None:
    out = printed(capsys, "plan", name, "--costs", costs_file, "--microbatches", 8)
    told = {
        "split": ["I and W each take half of the backward, as the costs have no weight_us"],
        "whole": ["R takes as long as F, as the costs have no recompute_us"] if name == "varuna" else [],
        "any": [],
    }
    assert [line for line in out.splitlines() if line.startswith("Assumed: ")] == [
        f"Assumed: {what}." for what in told[NAMED[name].backward]
    ]


def test_ranks_without_work_are_told(capsys: Capsys) -> None:
    code, _, error = run(capsys, "plan", "1f1b", "--ranks", 8, "--stages", 4, "--microbatches", 4)
    assert code == 0
    assert error == "rota plan: warning: 4 of 8 ranks have nothing to do; give more stages, or --ranks 4\n"
    assert run(capsys, "plan", "1f1b", "--ranks", 4, "--microbatches", 4)[2] == ""


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["plann"], 2, ["No such command 'plann'", "Did you mean", "'plan'"]),
        (["plan", "1f2b", "--ranks", "2", "--microbatches", "2"], 2, ["'1f2b'", "did you mean 1f1b?"]),
        (["plan", "1f1b", "--ranks", "x", "--microbatches", "2"], 2, ["--ranks", "'x' is not a valid whole number"]),
        (["plan", "1f1b", "--ranks", "2"], 2, ["--microbatches"]),
        (["plan", "1f1b", "--microbatches", "2"], 2, ["give --ranks"]),
        (["plan", "1f1b", "--ranks", "2", "--microbatches", "2", "--limit", "3 pounds"], 2, ["3 pounds", "40GB"]),
        (
            ["plan", "1f1b", "--ranks", "2", "--mikrobatches", "2"],
            2,
            ["No such option '--mikrobatches'. Did you mean '--microbatches'?"],
        ),
        (["check", "plan.json", "again.json"], 2, ["unexpected extra argument (again.json); see rota check -"]),
        (["run", "plan.json"], 2, ["Missing argument 'SCRIPT'; for example: rota run", "plan.json train.py"]),
        (["run", "plan.json", "--timline", "m.json"], 2, ["--timline comes after the plan; put"]),
        (["check", "absent.json"], 2, ["absent.json", "No such file"]),
        (
            ["plan", "1f1b", "--ranks", "4", "--microbatches", "8", "--activation", "1GB", "--limit", "2.5GB"],
            1,
            ["refused", "rank 0", "0F2", "2500000000 bytes"],
        ),
    ],
)
def test_errors(arguments: list[str], code: int, told: list[str], capsys: Capsys) -> None:
    error = refused(capsys, code, *arguments)
    for words in told:
        assert words in error


@pytest.mark.parametrize(
    ("name", "text", "code", "told"),
    [
        ("bad.json", '{"rota": "plan", ', 2, ["bad.json", "not JSON", "line 1"]),
        ("bad.json", '{"rota": "costs"}', 2, ["bad.json", '"costs"', "are for `rota plan NAME --costs`"]),
        ("train.py", "print()", 2, ["train.py is a Python file", "`rota run plan.json ", "`rota autoplan "]),
        ("bad.csv", "0F0,0B0\n1F0,1X0\n", 2, ["bad.csv", "line 2, cell 2", "'1X0'"]),
        ("bad.csv", "1F0\n", 2, ["bad.csv", "never runs stage 0"]),
        ("cycle.csv", "0B0,0F0\n1F0,1B0\n", 1, ["refused", "cycle", "0F0 comes after 0B0 in rank 0's order"]),
    ],
)
def test_bad_files(name: str, text: str, code: int, told: list[str], tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / name).write_text(text)
    error = refused(capsys, code, "check", tmp_path / name)
    for words in told:
        assert words in error


OPTIONAL = {  # without these, there is one thing less to read or to write
    *("--output", "--timeline", "--above"),
    *("calibrate --costs", "check --sms", "checkpoint export --config", "profile --lengths"),
    *("export megatron --layers", "export megatron --type"),
}


@pytest.mark.parametrize("name", ALL)
def test_help_teaches_by_example_and_says_every_default(
    name: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag in ("-h", "--help"):
        out = printed(capsys, *name.split(), flag)
        assert f":\n  rota {name}" in out.partition("\nExample")[2]
    for param in ALL[name].params:
        if isinstance(param, click.Option) and not param.is_flag and not param.required:
            option = next(option for option in param.opts if option.startswith("--"))
            assert "default" in str(param.help) or {option, f"{name} {option}"} & OPTIONAL, option
    monkeypatch.setenv("COLUMNS", "60")
    assert [line for line in run(capsys, *name.split(), "--help")[1].splitlines() if len(line) > 60] == []


def test_the_page_of_commands_has_all() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in COMMANDS if f"`rota {name}" not in page] == []


@pytest.mark.usefixtures("time_is_work")
@pytest.mark.parametrize(
    "command",
    [
        "plan search --ranks 3 --microbatches 4 --activation 1GB",
        "plan-batch sizes.json lengths.json",
        "profile model.py --device h100 --rows 1,2",
    ],
)
def test_reports_fit_the_terminal(
    command: str, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    curve = rota.Curve(60, 0.02, 4e-6)
    Path("sizes.json").write_text(rota.SizeModel((curve,), (curve,), activation_bytes=(rota.Curve(0, 9),)).to_json())
    Path("lengths.json").write_text("[130, 85, 60, 50]")
    Path("model.py").write_text(MODEL)
    monkeypatch.setenv("COLUMNS", "60")
    out = printed(capsys, *command.split())
    assert [line for line in out.splitlines() if len(line) > 60] == []


def test_bare_command_shows_the_first_commands(capsys: Capsys) -> None:
    out = printed(capsys)
    first = [line.split()[1] for line in out.splitlines() if line.startswith("  rota ")]
    assert first == ["demo", "autoplan", "show", "run", "explain"]
    assert "rota --help" in out


def test_charts_without_utf8(plan_file: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "rota", "show", str(plan_file)]
    shown = subprocess.run(command, capture_output=True, env=environment, timeout=150, check=True).stdout
    assert b"F- forward" in shown
    assert b"?" not in shown
    assert shown.isascii()


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GB", 40 * 10**9), ("512MiB", 2**29), ("7", 7), ("1.5 k", 1500), (f"{10**18 + 1}", 10**18 + 1)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["1.5", "-1", "1e3", ""])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text!r} is not a "):
        parse_bytes(text)
