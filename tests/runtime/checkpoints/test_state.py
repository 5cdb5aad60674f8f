"""Where the state of an optimizer is restored: beside its weight, and counts of steps where PyTorch has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rota.runtime.checkpoints.optimizer_state import Record, tensor_key
from rota.runtime.checkpoints.rank_file import Chunk
from rota.runtime.checkpoints.state import _state_tensors


@pytest.mark.parametrize("size", [(), (3,)])
@pytest.mark.parametrize(
    ("options", "of_count"),
    [({}, "cpu"), ({"fused": False}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")],
)
def test_a_count_of_steps_stays_on_the_cpu_unless_the_device_counts(
    size: tuple[int, ...], options: dict[str, Any], of_count: str
) -> None:
    weight = nn.Parameter(torch.empty(size, device="meta"))
    sizes = {"step": (), "exp_avg": size, "exp_avg_sq": size}
    chunks = {tensor_key("w", name): Chunk(name, torch.float32, of, ((), ())) for name, of in sizes.items()}
    found = _state_tensors(weight, "w", Record("Adam", options, {}, [*sizes], {}), chunks)
    assert [found[tensor_key("w", name)].device.type for name in sizes] == [of_count, "meta", "meta"]
