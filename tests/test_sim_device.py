"""The tests in tests/sim_device, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT, device_guard

pytestmark = pytest.mark.skipif(
    device_guard.COMPILER is None, reason="the simulated device is compiled, and there is no C++ compiler"
)
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/sim_device").glob("test_*.py"))
#: Autograd's engine makes its threads at the first backward, here before there is a simulated device.
AFTER_A_BACKWARD = """
import sys, pytest, torch
torch.ones((), requires_grad=True).sum().backward()
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_on_the_simulated_device() -> None:
    run_there("-m", "pytest", *FILES, "-m", "not sweep", timeout_s=580)


@pytest.mark.dist
def test_after_a_backward_in_the_same_process() -> None:
    run_there("-c", AFTER_A_BACKWARD, "tests/sim_device/test_placing.py", "-k", "are_restored or copied_once")


@pytest.mark.dist
@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_the_tests_of_accelerators(tmp_path: Path) -> None:
    """All that `make test-gpu` does, but for what the hardware is needed for in the end."""
    result = tmp_path / "result.json"
    run_there("-m", "pytest", "tests/gpu", timeout_s=880, ROTA_GPU_TESTS="sim", ROTA_GPU_RESULT=str(result))
    report = json.loads(result.read_text())
    assert report["machine"]["device_type"] == "sim"
    assert [test["outcome"] for test in report["tests"]].count("skipped") == 8  # those for CUDA and for Inductor


@pytest.mark.dist
@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_more_on_the_simulated_device() -> None:
    run_there("-m", "pytest", *FILES, "-m", "sweep or sampled", timeout_s=1780)


def run_there(*command: str, timeout_s: float = 120, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *command, "-q", "-p", "no:xdist", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | (environment or {"ROTA_SIM_DEVICE": "1"}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
