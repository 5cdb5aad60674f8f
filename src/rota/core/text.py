"""Text for people: times and sizes with three significant digits and a unit, tables, and lines that fit a width."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence

TIME_UNITS = ((1_000_000, "s"), (1_000, "ms"), (1, "µs"))
SIZE_UNITS = ((10**15, "PB"), (10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))
_BETWEEN = "  "  # columns of a table


def time_text(time_us: int) -> str:
    """12345 -> "12.3 ms"."""
    return _text(time_us, TIME_UNITS)


def size_text(num_bytes: int) -> str:
    """1500000000 -> "1.5 GB"."""
    return _text(num_bytes, SIZE_UNITS)


def exact_size_text(num_bytes: int) -> str:
    """70000000000 -> "70GB", as an option takes it: in the largest unit that needs no fraction."""
    options = (unit for unit in SIZE_UNITS[1:] if num_bytes and num_bytes % unit[0] == 0)  # no option takes PB
    length, name = next(options, SIZE_UNITS[-1])
    return f"{num_bytes // length}{name}"


def count_text(number: int, noun: str, plural: str = "s") -> str:
    """1, "rank" -> "1 rank", and 2000, "rank" -> "2,000 ranks"."""
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def angle_repr(noun: object) -> str:
    """`<…>` around the one line of `str`: the `repr` of nouns with so many fields that they would fill the screen."""
    return f"<{noun}>"


def limit_text(limits: Sequence[int | None]) -> str:
    """The memory limits of ranks, in few words."""
    sizes = [limit for limit in limits if limit is not None]
    if not sizes:
        return "no memory limit"
    least, most = size_text(min(sizes)), size_text(max(sizes))
    return f"memory limit {least}" if least == most else f"memory limits {least} to {most}"


def time_unit(time_us: int) -> tuple[int, str]:
    """The unit for an axis up to `time_us`: (its length in µs, its name)."""
    return _unit(time_us, TIME_UNITS)


def _unit(value: float, units: tuple[tuple[int, str], ...]) -> tuple[int, str]:
    return next((unit for unit in units if abs(value) >= unit[0]), units[-1])


def _text(value: int, units: tuple[tuple[int, str], ...]) -> str:
    rounded = float(f"{value:.3g}")  # before choosing the unit: 999999 is 1 MB, not 1000 kB
    length, name = _unit(rounded, units)
    return f"{rounded / length:g} {name}"


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
