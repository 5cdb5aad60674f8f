"""The tests in tests/sim_device, in processes of their own: two, as most of the time goes into starting them."""

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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *FILES[number::NUM_PROCESSES]],
        cwd=ROOT,
        env=os.environ | {"ROTA_SIM_DEVICE": "1"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
