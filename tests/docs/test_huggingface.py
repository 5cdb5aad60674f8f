"""The code of docs/huggingface.md runs, and says what the page says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from support import ROOT
from support.pool import Pool

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "huggingface.md").read_text(), flags=re.DOTALL)


def test_the_models_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {"__name__": "example"}
    exec(BLOCKS[0], space)
    assert "0 -> 1  model.layers.1  float32[2, 16, 64]  8,192 bytes" in capsys.readouterr().out
    exec(BLOCKS[2], space)
    assert [(one.source, one.target, one.name) for one in space["stages"].carried] == [
        (0, 1, "down.0"),
        (0, 1, "down.1"),
        (1, 2, "down.0"),
        (1, 2, "down.1"),
        (1, 2, "up.0"),
    ]
    x = torch.randn(2, 3, 12, 12)
    assert torch.equal(space["stages"].run(x), space["unet"](x))


def trained(rank: int) -> float:
    torch.manual_seed(1)
    space: dict[str, Any] = {"__name__": "example", "rank": rank}
    exec(BLOCKS[0], space)
    exec(BLOCKS[1], space)
    loss: float = space["loss"]
    return loss


@pytest.mark.dist
def test_the_training_runs(pool: Pool) -> None:
    losses = pool.run(2, trained, timeout_s=120)
    assert losses[0] == losses[1] > 0
