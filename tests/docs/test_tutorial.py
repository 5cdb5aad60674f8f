"""The tutorial's model and loop do what the page says, with a smaller model and fewer steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import ROOT
from support.commands import output_of
from support.pool import Pool

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
MODEL, TRAIN = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SMALLER = {"WIDTH, NUM_BLOCKS, VOCABULARY = 64, 192, 8, 1024": "WIDTH, NUM_BLOCKS, VOCABULARY = 64, 48, 4, 256"}
FEWER = {'glob("*.py"))': 'glob("*.py"))[:3]', "range(1, 41)": "range(1, 21)"}


def replaced(text: str, parts: dict[str, str]) -> str:
    for old, new in parts.items():
        assert text.count(old) <= 1
        text = text.replace(old, new)
    return text


@pytest.mark.dist
@pytest.mark.sweep  # test_run runs the same commands as the README has them
def test_the_tutorial(pool: Pool, tmp_path: Path) -> None:
    assert all(old in MODEL for old in SMALLER)
    assert all(old in MODEL + TRAIN for old in FEWER)
    (tmp_path / "model.py").write_text(replaced(MODEL, SMALLER | FEWER))
    (tmp_path / "train.py").write_text(replaced(TRAIN, FEWER))
    commands = re.findall(r"^    (rota .*)$", PAGE, flags=re.MULTILINE)
    first = {word: next(c for c in commands if c.startswith(f"rota {word} ")) for word in ("verify", "run", "explain")}
    verify, run, explain = first.values()
    # Instead of autoplan's plan, which takes a minute.
    output_of(pool, tmp_path, "rota plan 1f1b --ranks 2 --microbatches 8 -o plan.json")
    assert "exact" in output_of(pool, tmp_path, verify)
    printed = output_of(pool, tmp_path, run.replace("--timeline measured.json ", ""))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    output_of(pool, tmp_path, "rota show plan.json --timeline measured.json")
    assert "Causes, summed over all ranks" in output_of(pool, tmp_path, explain)
