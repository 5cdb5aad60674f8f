"""The tests in tests/sim_device, file by file, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import ROOT

FILES = sorted(path.name for path in (ROOT / "tests/sim_device").glob("test_*.py"))


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", FILES)
def test_on_the_simulated_device(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"tests/sim_device/{file}"],
        cwd=ROOT,
        env=os.environ | {"ROTA_SIM_DEVICE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
