"""The code of docs/huggingface.md runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from support import ROOT
from support.commands import output_of
from support.pool import Pool

PAGE = (ROOT / "docs" / "huggingface.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_unet_is_cut() -> None:
    space: dict[str, Any] = {"__name__": "example", "torch": torch}
    exec("import rota\n" + BLOCKS[1], space)
    assert [(one.source, one.target, one.name) for one in space["stages"].carried] == [
        (0, 1, "down.0"),
        (0, 1, "down.1"),
        (1, 2, "down.0"),
        (1, 2, "down.1"),
        (1, 2, "up.0"),
    ]
    x = torch.randn(2, 3, 12, 12)
    assert torch.equal(space["stages"].run(x), space["unet"](x))


@pytest.mark.dist
@pytest.mark.sweep  # test_examples trains such a model too
def test_the_training_prints_what_the_page_says(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BLOCKS[0])
    *_, printed = [output_of(pool, tmp_path, command) for command in re.findall(r"^    (rota .*)$", PAGE, flags=re.M)]
    (said,) = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
    number = r"(?<=loss )[\d.]+"
    assert re.sub(number, "", printed) == re.sub(number, "", said)
    losses, said_losses = ([float(loss) for loss in re.findall(number, text)] for text in (printed, said))
    assert losses == pytest.approx(said_losses, abs=0.1)
    assert losses[-1] < 0.7 * losses[0]
