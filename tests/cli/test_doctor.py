"""`rota doctor` on this machine, with real processes: its report, its JSON, its exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.test_cli import Capsys
from rota import diagnosis
from rota.cli import main
from rota.diagnosis import Finding, Report
from support import ROOT
from support.json_schema import violations

SCHEMA = json.loads((ROOT / "docs/doctor.schema.json").read_text())
#: In these tests accelerators, if there are any, are left alone.
WITHOUT_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "-1"}


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **WITHOUT_DEVICES}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=200)


@pytest.mark.dist
def test_a_cpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capsys) -> None:
    path = tmp_path / "doctor.json"
    for name, value in WITHOUT_DEVICES.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--ranks", "2", "-o", str(path)]) == 0
    out, error = capfd.readouterr()
    assert re.search(r"^ok +PyTorch +2\.", out, flags=re.MULTILINE)
    assert re.search(r"^ok +link 0-1 +\S+ .B/s, \d+ .s$", out, flags=re.MULTILINE)
    assert re.search(r"^ok +self-test +training gives the losses and weights", out, flags=re.MULTILINE)
    assert "Rota runs here." in out
    assert "rota doctor: starting 2 processes\n" in error  # also where it is no terminal
    report = json.loads(path.read_text())
    assert [*violations(report, SCHEMA)] == []
    assert report["self_test"]["exact"]
    assert main(["doctor", "-o", str(path)]) == 2  # it is there already


@pytest.mark.dist
@pytest.mark.sweep
def test_under_torchrun() -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = _python(*launcher, "-m", "rota", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)  # the first rank alone prints, and nothing else
    assert [*violations(report, SCHEMA)] == []
    assert (len(report["ranks"]), len(report["links"])) == (2, 1)


def test_where_torch_is_not_installed() -> None:
    """Nothing of the command or the room needs it."""
    code = "import sys; sys.modules['torch'] = None; from rota.cli import main; sys.exit(main(['doctor']))"
    done = _python("-c", code)
    assert done.returncode == 1, done.stderr
    assert re.search(r"problem +PyTorch +it cannot be imported", done.stdout)
    assert re.search(r"skipped +self-test +there is no PyTorch", done.stdout)


def test_a_problem_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    report = Report((Finding("problem", "self-test", "it broke", "fix it"),), {})
    monkeypatch.setattr(diagnosis, "examine", lambda num_ranks: report)
    assert main(["doctor"]) == 1
    assert "-> fix it" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "problem"


def test_ranks_are_the_launchers(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["doctor", "--ranks", "2"]) == 2
    assert "--ranks: the launcher has already started the processes; leave --ranks out" in capsys.readouterr().err
