"""Registering a device changes autograd in a whole process: tests/test_sim_device.py runs these in one of their own.

It must be registered before the first backward of a process, which starts autograd's threads: one per device. Processes
of the pool do that when they start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

if "ROTA_SIM_DEVICE" in os.environ:
    import support.sim_device  # noqa: F401

collect_ignore_glob = [] if "ROTA_SIM_DEVICE" in os.environ else ["test_*.py"]


@pytest.fixture
def device() -> Iterator[Any]:
    """A simulated device on which the test makes no race."""
    from support.sim_device import SimDevice

    with SimDevice().checked() as device:
        yield device


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is the only rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
