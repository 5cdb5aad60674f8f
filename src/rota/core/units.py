"""Times and sizes as text: three significant digits and a unit."""

from __future__ import annotations

from collections.abc import Sequence

TIME_UNITS = ((1_000_000, "s"), (1_000, "ms"), (1, "µs"))
SIZE_UNITS = ((10**15, "PB"), (10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


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
    given = [limit for limit in limits if limit is not None]
    if not given:
        return "no memory limit"
    least, most = size_text(min(given)), size_text(max(given))
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
