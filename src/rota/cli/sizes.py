"""Sizes of memory, links and meshes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

_TIMES_US = {"us": 1, "µs": 1, "ms": 1000, "s": 1_000_000}
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}


def parse_bytes(text: str) -> int:
    """Bytes: "40GB" -> 40000000000, "512MiB" -> 536870912, "1000" -> 1000. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmgt]i?)b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size; write bytes, or such as 40GB or 512MiB")
    number, unit = Fraction(match[1]), match[2]
    if not unit and number.denominator > 1:
        raise ValueError(f"{text!r} is no whole number of bytes; write such as {int(number)}, or {match[1]}GB")
    return int(number * (_UNITS | _BINARY)[unit])  # down: a limit is not to be exceeded by what a fraction adds


def parse_link(text: str) -> tuple[int, int | None]:
    """Latency in µs and bytes per µs: "5us,50GB/s" -> (5, 50000); either may be left out. Raises ValueError."""
    latency_us: int | None = None
    bytes_per_us: int | None = None
    for part in text.split(","):
        time = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|µs|ms|s)\s*", part)
        rate = re.fullmatch(r"\s*(.*)/s\s*", part)
        if rate is not None and rate[1].endswith("b"):
            raise ValueError(f"{text!r}: {part!r} would be bits; give bytes, B: an eighth of it")
        if time is not None and latency_us is None:
            latency_us = round(Fraction(time[1]) * _TIMES_US[time[2]])
        elif (
            rate is not None
            and bytes_per_us is None
            and (per_us := round(Fraction(parse_bytes(rate[1]), 1_000_000))) > 0
        ):
            bytes_per_us = per_us
        else:
            raise ValueError(
                f"{text!r} is no link: {part!r} is wrong; write latency and rate, such as 5us,50GB/s, each at most once"
            )
    return latency_us or 0, bytes_per_us


def parse_mesh(text: str) -> dict[str, int]:
    """The size of each dimension: "pp=4,dp=2" -> {"pp": 4, "dp": 2}. Raises ValueError."""
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(pp|dp|tp)\s*=\s*([1-9]\d*)\s*", part)
        if match is None or match[1] in found:
            raise ValueError(f"{text!r} is no mesh: {part!r} is wrong; write such as pp=4,dp=2,tp=1, each at most once")
        found[match[1]] = int(match[2])
    return found
