"""The tests on accelerators, tried on the CPU: ranks are started, failures are told, and the result is written."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from support import ROOT
from support.gpu.ranks import RankFailed, results_of, run_ranks

pytestmark = pytest.mark.dist

CHOSEN = "test_every_family and 2-float64 or test_wrapped_stages and fsdp-1f1b and 1-2 or test_a_wait_would_be_noticed"


def run_gpu_tests(*options: str, **environment: str) -> str:
    """What they print."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/gpu", *options]
    inherited = {name: value for name, value in os.environ.items() if name != "ROTA_GPU_TESTS"}
    done = subprocess.run(command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.sweep
def test_the_result_has_what_the_tests_have_seen(tmp_path: Path) -> None:
    file = tmp_path / "result.xml"
    run_gpu_tests("-k", CHOSEN, "--junitxml", str(file), "-o", "junit_family=xunit1", ROTA_GPU_TESTS="cpu")
    (suite,) = ElementTree.parse(file).getroot()
    assert properties_of(suite)["device_type"] == "cpu"
    tests = {test.get("name"): test for test in suite.iter("testcase")}
    family = tests["test_every_family[2-float64]"]
    assert float(family.get("time", 0)) > 0
    assert max(ast.literal_eval(properties_of(family)["worst_difference"]).values()) <= 1e-10
    assert "worst_difference" in properties_of(tests["test_wrapped_stages[1-2-fsdp-1f1b]"])
    skipped = tests["test_a_wait_would_be_noticed"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "is for CUDA, and the device here is cpu"


def properties_of(element: ElementTree.Element) -> dict[str, str]:
    return {each.get("name", ""): each.get("value", "") for each in element.iterfind("properties/property")}


@pytest.mark.sweep
def test_without_accelerators_all_are_skipped_with_the_reason() -> None:
    printed = run_gpu_tests("-rs")
    assert "needs accelerators, and PyTorch" in printed or "run by `make test-gpu` alone" in printed
    assert "passed" not in printed


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
