"""Errors on one rank, a loss that is nan, a full disk, connections that are shut."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.faulty_training import Fault, Setup, run_case
from support.pool import Pool

pytestmark = [pytest.mark.dist, pytest.mark.faults]

ZB, REPLICAS, LATER = Setup(), Setup("1f1b", 2, 2), Setup(asynchronous=True)

CASES = [
    (ZB, Fault("raise", 0, "forward")),
    (ZB, Fault("raise", 1, "backward")),
    (ZB, Fault("raise", 1, "1W2")),
    (ZB, Fault("raise", 2, "loss")),
    # while the others begin a step, add up losses, clip, reduce, save
    (ZB, Fault("raise", 2, "between steps")),
    (ZB, Fault("raise", 1, "losses")),
    (ZB, Fault("raise", 0, "clip")),
    *((REPLICAS, Fault("raise", process, "reduction")) for process in (0, 3)),
    (ZB, Fault("interrupt", 1, "forward")),
    (ZB, Fault("interrupt", 0, "clip")),
    (ZB, Fault("exit", 1, "between steps")),
    (ZB, Fault("exit", 2, "clip")),
    *((ZB, Fault("nan", 2, str(microbatch))) for microbatch in (0, 3)),
    *((ZB, Fault("fill", rank, "write")) for rank in (0, 2)),
    (LATER, Fault("fill", 1, "write")),
    *((ZB, Fault("shut", rank, f"{rank}F2")) for rank in (0, 2)),
    (ZB, Fault("shut", 1, "1W1")),
]


@pytest.mark.parametrize(
    ("setup", "fault"), CASES, ids=[f"{number}-{fault}" for number, (_, fault) in enumerate(CASES)]
)
def test_failing(pool: Pool, tmp_path: Path, setup: Setup, fault: Fault) -> None:
    run_case(pool, tmp_path, setup, fault)
