"""The code of the pages of docs/."""

from __future__ import annotations

import re

from support import ROOT


def blocks(page: str, language: str = "python", *, section: str = "") -> list[str]:
    """The code blocks of a page of docs/, or of its section with this heading."""
    text = (ROOT / "docs" / page).read_text()
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
