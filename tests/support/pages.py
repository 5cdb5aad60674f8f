"""What tests take from the pages in docs/: their code, and the commands that they show."""

import re
from pathlib import Path
from typing import Any

from support import ROOT

DOCS = ROOT / "docs"


def text_of(page: str | Path) -> str:
    """The text of a page, or of one section of it: "data.md#Losses and metrics"."""
    name, _, heading = str(page).partition("#")
    text = (DOCS / name).read_text()
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0] if heading else text


def python_blocks(page: str | Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(page), flags=re.DOTALL)


def commands(page: str | Path, program: str = "rota") -> list[str]:
    """The lines that start `program`."""
    return re.findall(rf"^    ({program} .*)$", text_of(page), flags=re.MULTILINE)


def run(page: str, number: int = 0, space: dict[str, Any] | None = None) -> None:
    """Run one of the page's blocks, with the names in `space`."""
    space = {} if space is None else space
    space.setdefault("__name__", "example")
    exec(compile(python_blocks(page)[number], f"docs/{page}", "exec"), space)
