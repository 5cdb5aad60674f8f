"""The tests in tests/sim_device, in processes of their own: two, as most of the time would go into starting more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import ROOT

FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/sim_device").glob("test_*.py"))
NUM_PROCESSES = 2


@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(NUM_PROCESSES))
def test_on_the_simulated_device(number: int) -> None:
    run_there(FILES[number::NUM_PROCESSES], "not sweep")


@pytest.mark.dist
@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_more_on_the_simulated_device() -> None:
    run_there(FILES, "sweep")


def run_there(files: list[str], marked: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marked]
    done = subprocess.run(
        [*command, *files],
        cwd=ROOT,
        env=os.environ | {"ROTA_SIM_DEVICE": "1"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
