"""`torch.manual_seed` seeds the simulated device too, in these tests alone."""

from __future__ import annotations

from functools import partial

import pytest

from support.sim_device.tensors import BACKEND


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `BACKEND`."""
    monkeypatch.setattr(BACKEND, "_is_in_bad_fork", partial(bool, False))
