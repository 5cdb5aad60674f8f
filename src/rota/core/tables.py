"""Tables and lines as text that fits a width: columns are as wide as their widest cell, so that none overlap."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence

_BETWEEN = "  "


def fitted(line: str, width: int | None, indent: int | None = None) -> str:
    """Return `line` in lines of at most `width` characters where its words allow it; None: unchanged.

    The second line and those after it begin with `indent` spaces, by default two more than the first.
    """
    if width is None or len(line) <= width:
        return line
    if indent is None:
        indent = len(line) - len(line.lstrip()) + 2
    further = " " * min(indent, width // 2)
    return textwrap.fill(line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


def table_lines(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str] = (),
    width: int | None = None,
    optional: Sequence[str] = (),
) -> list[str]:
    """Return the lines of a table, the header first.

    Args:
        header: The columns' names, each different.
        rows: The cells, one per column.
        left: The columns that are aligned to the left; the others are aligned to the right.
        width: The number of characters that a line may have; None: any.
        optional: The columns that are left out where the table is wider than that, the first of these first.

    Returns:
        Lines without trailing spaces.
    """
    cells = [tuple(header), *map(tuple, rows)]
    columns = dict(zip(header, zip(*cells, strict=True), strict=True))
    widths = {name: max(map(len, column)) for name, column in columns.items()}
    for name in optional:
        if width is None or sum(widths.values()) + len(_BETWEEN) * (len(widths) - 1) <= width:
            break
        widths.pop(name, None)
    padded = [
        [cell.ljust(widths[name]) if name in left else cell.rjust(widths[name]) for cell in columns[name]]
        for name in widths
    ]
    return [_BETWEEN.join(line).rstrip() for line in zip(*padded, strict=True)]
