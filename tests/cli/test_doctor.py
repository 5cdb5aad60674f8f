"""`rota doctor` on this machine, with real processes: its report, its JSON, its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rota.cli import main
from support import ROOT
from support.fake_machines import FakeCuda, FakeRanks
from support.json_schema import violations

SCHEMA = json.loads((ROOT / "docs/doctor.schema.json").read_text())
#: In these tests accelerators, if there are any, are left alone.
WITHOUT_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "-1"}


def _doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rota", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **WITHOUT_DEVICES}, timeout=200)


@pytest.mark.dist
def test_a_cpu_machine(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    done = _doctor("--ranks", "2", "-o", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    sections = re.findall(r"^(\w.*)$", done.stdout, flags=re.MULTILINE)
    assert sections[:4] == ["software", "host", "environment variables", "accelerators"]
    assert re.search(r"ok +PyTorch +2\.", done.stdout)
    assert re.search(r"skipped  devices, peer access +there is none|warning +devices", done.stdout)
    assert re.search(r"ok +0-1 +\S+ .B/s, .*Gloo on the host, which has no rating", done.stdout)
    assert re.search(r"ok +dualpipe, 2 ranks +loss and gradients as in the unsplit model", done.stdout)
    assert sections[-2].endswith("Rota runs here.")
    assert "rota doctor: starting 2 processes on cpu\n" in done.stderr  # also where it is no terminal

    report = json.loads(path.read_text())
    assert [*violations(report, SCHEMA)] == []
    assert report["verdict"] in ("ok", "warning")
    assert [case["verdict"] for case in report["self_test"]] == ["ok"] * 4
    assert [rank["torch"] for rank in report["ranks"]] == [str(torch.__version__)] * 2
    (link,) = report["links"]
    assert link["ranks"] == [0, 1]
    assert link["bytes_per_s"] > 0
    assert main(["doctor", "-o", str(path)]) == 2  # it is there already


@pytest.mark.dist
@pytest.mark.sweep
def test_json_to_standard_output_is_all_that_is_there() -> None:
    done = _doctor("--ranks", "2", "--no-self-test", "--json")
    report = json.loads(done.stdout)
    assert [*violations(report, SCHEMA)] == []
    assert report["self_test"] == []
    assert len(report["links"]) == 1


@pytest.mark.dist
@pytest.mark.sweep
def test_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "rota", "doctor"]
    environment = {**os.environ, **WITHOUT_DEVICES}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("self-test, on the CPU") == 1  # the first rank alone prints
    assert "ok       dualpipe, 2 ranks" in done.stdout


def test_where_torch_is_not_installed() -> None:
    """Nothing of the command or the room needs it."""
    code = "import sys; sys.modules['torch'] = None; from rota.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr
    assert re.search(r"problem +PyTorch +it cannot be imported", done.stdout)
    assert re.search(r"skipped +links, clocks, self-test +there is no PyTorch", done.stdout)


def test_exit_codes_follow_from_problems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    FakeCuda(number=2).install(monkeypatch)
    FakeRanks().install(monkeypatch)
    assert main(["doctor"]) == 0
    assert "Rota runs here." in capsys.readouterr().out
    FakeRanks(failing={"1f1b": "rank 0: it broke"}).install(monkeypatch)
    assert main(["doctor"]) == 1
    assert "rank 0: it broke" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "problem"


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["--full", "--no-self-test"], "--full is a longer self-test; leave one out"),
        (["-o", str(tmp_path / "nowhere" / "doctor.json")], "its folder does not exist"),
    ):
        assert main(["doctor", *arguments]) == 2
        assert told in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert main(["doctor", "--ranks", "2"]) == 2
    assert "--ranks: the launcher has already started the processes; leave --ranks out" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--ranks", "0"])
    assert ended.value.code == 2
