"""PyTorch looks up the simulated device's module as `torch.sim`, which other tests must not meet."""

from __future__ import annotations

import pytest
import torch

import support.sim_device  # noqa: F401 - registers it

_MODULE = torch.sim  # type: ignore[attr-defined]
del torch.sim  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def device_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.sim` is there during each test of this folder."""
    monkeypatch.setattr(torch, "sim", _MODULE, raising=False)
