"""Tests that need accelerators, run by `make test-gpu`. What they measure is in one JSON, as is the machine.

ROTA_GPU_TESTS=1        what `make test-gpu` sets
ROTA_GPU_TESTS=sim      the same on simulated devices, small, to try the tests themselves; those whose tensors cannot be
                        simulated take the CPU. `make test` does that, see tests/test_sim_device.py
ROTA_GPU_RESULT=FILE    where the JSON goes
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.gpu.ranks import Place, Ranks, ways_to_share
from support.pool import Pool

WISH = os.environ.get("ROTA_GPU_TESTS", "")
MACHINE: dict[str, Any] = {}
TESTS: list[dict[str, Any]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")[-3000:]
        fields = {"test": report.nodeid.partition("tests/gpu/")[2], "outcome": report.outcome, "why": why}
        TESTS.append(fields | {"seconds": round(report.duration, 2), "measured": dict(report.user_properties)})


def pytest_sessionfinish() -> None:
    if MACHINE and (path := os.environ.get("ROTA_GPU_RESULT")):
        Path(path).write_text(json.dumps({"machine": MACHINE, "tests": TESTS}, indent=1) + "\n")


class Hardware(NamedTuple):
    """The devices of this machine, how ranks may share them, and the processes on them."""

    place: Place
    shared: Place | None
    pools: dict[Place, Pool]

    @property
    def is_real(self) -> bool:
        return self.place.kind != "sim"


@pytest.fixture(scope="session")
def hardware() -> Iterator[Hardware]:
    """Skips where there is none."""
    import torch
    import torch.distributed as dist

    if not WISH:
        pytest.skip("run by `make test-gpu` alone: it measures, and takes all accelerators")
    place, pools = Place("sim", 1, "sim"), dict[Place, Pool]()
    if WISH != "sim":
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            pytest.skip(f"needs accelerators, and PyTorch {torch.__version__} finds none here; see `make test-gpu`")
        backend = dist.get_default_backend_for_device(device)
        place = Place(device.type, torch.accelerator.device_count(), backend)
    yield Hardware(place, shared_place(place, pools), pools)
    for pool in pools.values():
        pool.remove()


def shared_place(place: Place, pools: dict[Place, Pool]) -> Place | None:
    """How ranks share devices, tried with one more than devices; notes it, and the machine."""
    from support.gpu import jobs  # imports PyTorch

    MACHINE.update(Ranks(place, None, pools)(1, jobs.machine)[0], sharing=[])
    num_ranks = place.number + 1
    for way in ways_to_share(place, tuple(MACHINE.get("nccl", ()))) if num_ranks <= 4 else ():
        try:
            assert Ranks(place, way, pools)(num_ranks, jobs.exchanged) == [float(num_ranks)] * num_ranks
        except AssertionError as error:
            MACHINE["sharing"].append(f"{way}: {str(error)[-1000:]}")
        else:
            MACHINE["sharing"].append(f"{way}: works")
            return way
    return None


@pytest.fixture
def ranks(hardware: Hardware) -> Ranks:
    return Ranks(*hardware)


@pytest.fixture
def ranks_or_cpu(hardware: Hardware) -> Ranks:
    """For what knows no simulated tensors: FSDP2, DDP, torch.compile."""
    return Ranks(*hardware if hardware.is_real else (Place("cpu", 4, "gloo"), None, hardware.pools))
