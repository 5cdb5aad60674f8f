"""What `make site` changes in pages that are also read on a code host."""

from __future__ import annotations

import re
from typing import Any

#: Links to files outside of docs/, which the site does not have.
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!docs/)[^)#]*(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces links to files of the repository by their text; links within docs/ stay."""
    return markdown if page.file.src_uri.startswith("api/") else _OUTSIDE.sub(r"\1", markdown)
