"""The training loop of docs/precision.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import ROOT
from support.commands import output_of
from support.pool import Pool

pytestmark = pytest.mark.dist

PAGE = ROOT / "docs" / "precision.md"


def test_the_loop_of_the_docs(pool: Pool, tmp_path: Path) -> None:
    page = PAGE.read_text()
    (script,) = re.findall(r"```python\n# train.py\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    *_, told = [output_of(pool, tmp_path, command) for command in re.findall(r"^    (rota .*)$", page, flags=re.M)]
    loss, scale = re.fullmatch(r"loss (\S+), norm \S+, scale (\S+)\n", told).groups()  # type: ignore[union-attr]
    assert float(loss) < 3.0
    assert float(scale) == 4096
