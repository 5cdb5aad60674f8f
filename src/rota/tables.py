"""Tables as text: columns as wide as their widest cell, so that no two can run into each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

_BETWEEN = "  "


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
