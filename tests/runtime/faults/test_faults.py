"""Faults, one of each sort: all processes end with the right message, and the next run goes on as if nothing had been.

All the others are in test_failing, test_killed, test_launched and test_stopped.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rota import Pipeline
from support import ROOT
from support.faulty_training import Fault, Setup, run_case
from support.networks import chain, loss_fn
from support.pool import Pool

pytestmark = pytest.mark.dist

CASES = [
    (Setup(), Fault("kill", 1, "1I2")),
    (Setup("1f1b", 2, 2), Fault("kill", 3, "reduction")),
    (Setup(), Fault("stop", 0, "0F2")),
    (Setup(), Fault("raise", 2, "backward")),
    (Setup(), Fault("fill", 1, "write")),
    (Setup(), Fault("shut", 1, "1F2")),
]


@pytest.mark.parametrize(("setup", "fault"), CASES, ids=[str(fault) for _, fault in CASES])
def test_fault(pool: Pool, tmp_path: Path, setup: Setup, fault: Fault) -> None:
    run_case(pool, tmp_path, setup, fault)


def run_block(rank: int, code: str) -> float:
    metrics = torch.ones(1)
    with Pipeline(chain(3), Setup().plan(), loss_fn) as pipeline:
        exec(code, {"pipeline": pipeline, "metrics": metrics, "torch": torch})
    return metrics.item()


def test_the_code_of_the_docs_runs(pool: Pool) -> None:
    page = ROOT / "docs" / "faults.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert pool.run(3, run_block, code) == [3.0] * 3
