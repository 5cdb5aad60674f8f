"""The tests in tests/sim_device, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import ROOT

FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/sim_device").glob("test_*.py"))


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_on_the_simulated_device() -> None:
    run_there("not sweep", timeout_s=580)


@pytest.mark.dist
@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_more_on_the_simulated_device() -> None:
    run_there("sweep or sampled", timeout_s=1780)


def run_there(marked: str, timeout_s: float) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marked]
    done = subprocess.run(
        [*command, *FILES],
        cwd=ROOT,
        env=os.environ | {"ROTA_SIM_DEVICE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
