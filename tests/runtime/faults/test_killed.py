"""SIGKILL at each kind of op, and wherever else ranks wait for each other; each moment with another rank.

These are processes by themselves; `tests/runtime/launching/test_deaths.py` has them under `rota run`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.faulty_training import Fault, Setup, run_case
from support.pool import Pool

pytestmark = [pytest.mark.dist, pytest.mark.faults]

ZB, B, AGAIN = Setup(), Setup("1f1b"), Setup("again")
REPLICAS, LARGE, LATER = Setup("1f1b", 2, 2), Setup(width=6 * 100), Setup(asynchronous=True)

CASES = [
    *((ZB, Fault("kill", rank, f"{rank}{kind}{rank + 1}")) for rank, kind in enumerate("FIW")),
    *((B, Fault("kill", rank, f"{rank}B{3 - rank}")) for rank in (0, 2)),
    (AGAIN, Fault("kill", 1, "1R0")),
    # while it waits for a value: killed by the one that would send it
    (ZB, Fault("kill 1", 0, "0F2")),
    (ZB, Fault("kill 0", 1, "1I1")),
    # while what it sent is on the wire, megabytes of it
    (LARGE, Fault("kill", 0, "after 0F1")),
    (LARGE, Fault("kill", 2, "after 2I1")),
    # while replicas average gradients
    *((REPLICAS, Fault("kill", process, "reduction")) for process in (0, 3)),
    # between and after steps
    (ZB, Fault("kill", 1, "between steps")),
    (ZB, Fault("kill", 2, "losses")),
    (ZB, Fault("kill", 0, "clip")),
    # while checkpoints are written
    (ZB, Fault("kill", 1, "write")),
    *((LATER, Fault("kill", rank, "write")) for rank in (0, 2)),
    (ZB, Fault("kill", 0, "publish")),
]


@pytest.mark.parametrize(
    ("setup", "fault"), CASES, ids=[f"{number}-{fault}" for number, (_, fault) in enumerate(CASES)]
)
def test_killed(pool: Pool, tmp_path: Path, setup: Setup, fault: Fault) -> None:
    run_case(pool, tmp_path, setup, fault)
