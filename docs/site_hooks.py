"""What `make site` changes in pages that are also read on a code host."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

#: Links to files outside of docs/, which the site does not have.
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+[^)]*\)")
_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)#]+)\.png\)")
_FILE_NAME = re.compile(r"\[[\w-]+\.md\]\(([^)#]+\.md)((?:#[^)]*)?)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Gives links the titles of pages instead of file names, and pictures their dark versions.

    Links out of docs/ become text.
    """
    titles = _titles(config.nav)

    def titled(link: re.Match[str]) -> str:
        name = PurePosixPath(link[1]).name
        return f"[{titles.get(name, name)}]({link[1]}{link[2]})"

    def themed(picture: re.Match[str]) -> str:
        alt, path = picture.groups()
        if not Path(page.file.abs_src_path).parent.joinpath(f"{path}.dark.png").exists():
            return picture[0]
        return f"![{alt}]({path}.png#only-light)![{alt}]({path}.dark.png#only-dark)"

    inside = markdown if page.file.src_uri.startswith("api/") else _OUTSIDE.sub(r"\1", markdown)
    return _PICTURE.sub(themed, _FILE_NAME.sub(titled, inside))


def _titles(nav: Any) -> dict[str, str]:
    """The title of each page, as the navigation has it."""
    if isinstance(nav, dict):
        found: dict[str, str] = {}
        for title, below in nav.items():
            found |= {PurePosixPath(below).name: title} if isinstance(below, str) else _titles(below)
        return found
    return {name: title for entry in nav for name, title in _titles(entry).items()} if isinstance(nav, list) else {}
