"""The code of docs/data.md runs, and trains as the unsplit model does."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cli.test_run import rota
from support import ROOT
from support.commands import output_of
from support.pages import blocks
from support.pool import Pool

pytestmark = pytest.mark.dist


def commands_of(section: str, folder: Path) -> list[str]:
    """The section's commands, with its script in `folder`."""
    (folder / "train.py").write_text(blocks("data.md", section=section)[0])
    text = (ROOT / "docs" / "data.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^    (rota .*)$", text, flags=re.MULTILINE)


def test_data(tmp_path: Path) -> None:
    """In processes of its own, since those of the pool may not start the loader's workers."""
    *_, done = [rota(tmp_path, *command.split()[1:]) for command in commands_of("Data", tmp_path)]
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"^loss (\S+)$", done.stdout, flags=re.MULTILINE)
    assert float(loss) < 0.35


def test_only_what_is_read_is_loaded() -> None:
    given: list[Any] = []
    pipeline = SimpleNamespace(reads_inputs=True, reads_targets=False, step=lambda *batch: given.append(batch))
    space = {"pipeline": pipeline, "load_inputs": lambda: 1, "load_targets": lambda: 1 / 0}
    exec(blocks("data.md", section="Data")[1], space)
    assert given == [(1, None)]


def test_losses(pool: Pool, tmp_path: Path) -> None:
    """The page's script in two processes, and its fragment in a loop on the unsplit model."""
    commands_of_page = commands_of("Losses and metrics", tmp_path)
    *_, told = [output_of(pool, tmp_path, command) for command in commands_of_page]
    loss, accuracy = re.findall(r"^loss (\S+), accuracy (\S+)%$", told, flags=re.MULTILINE)[0]
    script, steps, fragment, _ = blocks("data.md", section="Losses and metrics")
    begin, loop = script.split("    for step in range(30):\n")
    end = loop[loop.index("    if pipeline.rank == 0:") :]
    batches = "    batches = [(tokens, labels)] * 30\n"
    (tmp_path / "train.py").write_text(begin + batches + indent(steps, "    ") + end)
    *losses, last = output_of(pool, tmp_path, commands_of_page[-1]).splitlines()
    assert last in told  # the same loss and accuracy
    assert len([line for line in losses if line.startswith("loss")]) == 29
    space: dict[str, Any] = {"__name__": "example"}
    exec(script.split("plan = rota.given_plan()")[0], space)
    optimizer = torch.optim.AdamW(space["model"].parameters(), lr=1e-2)
    for _ in range(30):
        exec(fragment, space)
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss) == pytest.approx(space["loss"].item(), abs=2e-3)
    right, count = space["loss_fn"](space["output"], space["labels"])["accuracy"]
    assert float(accuracy) == pytest.approx(100 * (right / count).item(), abs=0.6)
