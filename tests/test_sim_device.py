"""The tests in tests/sim_device, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import ROOT


@pytest.mark.dist
def test_the_simulated_device() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/sim_device"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"ROTA_SIM_DEVICE": "1"}, capture_output=True, text=True, timeout=230
    )
    assert done.returncode == 0, done.stdout + done.stderr
