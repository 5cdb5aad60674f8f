"""Tests that need accelerators, run by `make test-gpu`. What they measure is in pytest's report, as is the machine.

ROTA_GPU_TESTS=1     what `make test-gpu` sets
ROTA_GPU_TESTS=cpu   the same on the CPU with Gloo, small, to try the tests themselves; what is for CUDA is skipped
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.gpu.ranks import RankPool, results_of

WISH = os.environ.get("ROTA_GPU_TESTS", "")


@pytest.fixture(scope="session")
def device_type() -> str:
    """What the tests run on; skips where it is not there."""
    import torch

    if WISH == "cpu":
        return "cpu"
    if not torch.accelerator.is_available():
        pytest.skip(f"needs accelerators, and PyTorch {torch.__version__} finds none here; see `make test-gpu`")
    if not WISH:
        pytest.skip("run by `make test-gpu` alone: it measures, and takes all accelerators")
    current = torch.accelerator.current_accelerator()
    assert current is not None
    return current.type


@pytest.fixture(scope="session")
def is_small(device_type: str) -> bool:
    """Whether to take sizes that a CPU runs in no time."""
    return device_type == "cpu"


@pytest.fixture(scope="session", autouse=True)
def machine(
    device_type: str,
    tmp_path_factory: pytest.TempPathFactory,
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    from support.gpu.jobs import machine

    (found,) = results_of(tmp_path_factory.mktemp("machine"), 1, device_type, machine)
    for name, value in found.items():
        record_testsuite_property(name, value)


@pytest.fixture(autouse=True)
def enough(request: pytest.FixtureRequest, device_type: str) -> int:
    """How many ranks the test has, `gpu(NUMBER)`; skips where there are fewer devices, or where it is for CUDA."""
    import torch

    needed = next(iter(request.node.get_closest_marker("gpu").args), 1)
    if device_type != "cpu" and torch.accelerator.device_count() < needed:
        pytest.skip(f"needs {needed} accelerators, and PyTorch finds {torch.accelerator.device_count()} here")
    if device_type != "cuda" and request.node.get_closest_marker("cuda"):
        pytest.skip(f"is for CUDA, and the device here is {device_type}")
    return int(needed)


@pytest.fixture
def ranks(tmp_path: Path, device_type: str) -> Callable[..., Any]:
    """`ranks(number, job, *args)`: what the ranks return, each a new process with a device of its own."""
    jobs = 0

    def run(num_ranks: int, job: Callable[..., Any], *args: Any, **how: Any) -> Any:
        nonlocal jobs
        jobs += 1
        return results_of(tmp_path / f"ranks{jobs}", num_ranks, device_type, job, *args, **how)

    return run


@pytest.fixture
def rank_pool(tmp_path: Path, device_type: str) -> RankPool:
    """For tests that were written for the CPU and the pool of processes."""
    return RankPool(tmp_path / "pool", device_type)
