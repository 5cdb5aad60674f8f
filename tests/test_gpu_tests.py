"""The tests on accelerators, tried on the CPU: ranks are started, failures are told, and the result is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import ROOT
from support.gpu.ranks import RankFailed, results_of, run_ranks

pytestmark = pytest.mark.dist

CHOSEN = "test_every_family and 2-float64 or test_wrapped_stages and fsdp-1f1b and 1-2 or test_a_wait_would_be_noticed"


@pytest.mark.sweep
def test_the_result_has_what_the_tests_have_seen(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "tests/gpu",
        "-k",
        CHOSEN,
    ]
    environment = os.environ | {"ROTA_GPU_TESTS": "cpu", "ROTA_GPU_RESULT": str(file)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["format"] == 1
    assert result["machine"]["device_type"] == "cpu"
    tests = result["tests"]
    family = tests["test_exact.py::test_every_family[2-float64]"]
    assert family["outcome"] == "passed"
    assert family["seconds"] > 0
    assert max(family["numbers"]["worst_difference"].values()) <= 1e-10
    assert tests["test_exact.py::test_wrapped_stages[1-2-fsdp-1f1b]"]["outcome"] == "passed"
    skipped = tests["test_enqueueing.py::test_a_wait_would_be_noticed"]
    assert (skipped["outcome"], skipped["reason"]) == ("skipped", "is for CUDA, and the device here is cpu")


@pytest.mark.sweep
def test_without_accelerators_all_are_skipped_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/gpu"]
    environment = os.environ | {"ROTA_GPU_RESULT": str(file)}
    environment.pop("ROTA_GPU_TESTS", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "needs accelerators, and PyTorch" in done.stdout or "run by `make test-gpu` alone" in done.stdout
    assert "passed" not in done.stdout
    assert not file.exists()


def does(rank: int, device: Any, what: str) -> int:
    if rank == 1 and what == "raises":
        raise ValueError("broken on purpose")
    if rank == 1 and what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and what == "hangs":
        signal.pause()
    assert device.type == "cpu"
    return rank * 10


@pytest.mark.sweep
def test_ranks_that_fail_are_told_and_ended(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1: exit code 1\n(.|\n)*ValueError: broken on purpose"):
        results_of(tmp_path / "b", 2, "cpu", does, "raises")
    assert [one.exit_code for one in run_ranks(tmp_path / "c", 2, "cpu", does, "is killed")] == [0, -signal.SIGKILL]
    hung = run_ranks(tmp_path / "d", 2, "cpu", does, "hangs", expected=[0])[1]
    assert hung.exit_code is None
    assert "in does" in hung.stderr  # where it hung
