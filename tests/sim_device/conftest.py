"""From its registration on, the device is a process's accelerator: tests/test_sim_device.py runs these in their own.

Autograd's engine runs backwards in a thread of the device if it was registered before the first one, as it is in the
processes of the pool; else in the thread that calls it.
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
