"""The values of options: a text as what it means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

from rota.cli.command import Value

_TIMES_US = {"us": 1, "µs": 1, "ms": 1000, "s": 1_000_000}
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}


def parse_bytes(text: str) -> int:
    """Return bytes: "40GB" -> 40000000000, "512MiB" -> 536870912, "1000" -> 1000. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmgt]i?)b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write, for example, 40GB or 512MiB")
    number, unit = Fraction(match[1]), match[2]
    if not unit and number.denominator > 1:
        raise ValueError(f"{text!r} is not a whole number of bytes; write, for example, {int(number)}, or {match[1]}GB")
    return int(number * (_UNITS | _BINARY)[unit])  # rounded down: a limit must not be exceeded by a fraction of a byte


def parse_memory(text: str) -> int | Fraction:
    """Return bytes ("40GB", "1000B"), or a share of the device's memory ("80%" -> 4/5). Raises ValueError."""
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if share is not None:
        if not 0 < Fraction(share[1]) <= 100:
            raise ValueError(f"{text!r} must be more than 0% and at most 100%")
        return Fraction(share[1]) / 100
    num_bytes = parse_bytes(text)
    if text.strip()[-1].isdigit():  # the unit was probably forgotten
        raise ValueError(f"{text!r} has no unit; write, for example, {text}GB, or {text}B for bytes")
    return num_bytes


def parse_limit(text: str) -> int:
    """Return bytes, as `parse_memory`, where the device is not known that a share would refer to. Raises ValueError."""
    num_bytes = parse_memory(text)
    if isinstance(num_bytes, Fraction):
        raise ValueError(
            f"{text!r} is a share of a device's memory, but this command does not know the device; write a size, "
            f"for example 40GB (`rota autoplan --memory` takes shares)"
        )
    return num_bytes


def parse_link(text: str) -> tuple[int, int | None]:
    """Return latency in µs and bytes per µs: "5us,50GB/s" -> (5, 50000); either may be left out. Raises ValueError."""
    latency_us: int | None = None
    bytes_per_us: int | None = None
    for part in text.split(","):
        time = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|µs|ms|s)\s*", part)
        rate = re.fullmatch(r"\s*(.*)/s\s*", part)
        if rate is not None and rate[1].endswith("b"):
            raise ValueError(
                f"{text!r}: {part!r} is in bits; give the rate in bytes (B), which is one eighth of that number"
            )
        if time is not None and latency_us is None:
            latency_us = round(Fraction(time[1]) * _TIMES_US[time[2]])
        elif (
            rate is not None
            and bytes_per_us is None
            and (per_us := round(Fraction(parse_bytes(rate[1]), 1_000_000))) > 0
        ):
            bytes_per_us = per_us
        else:
            raise ValueError(f"{text!r} is not a link: {part!r} is wrong; write latency and rate, such as 5us,50GB/s")
    return latency_us or 0, bytes_per_us


def parse_mesh(text: str) -> dict[str, int]:
    """Return sizes by dim: "pp=4,dp=2" -> {"pp": 4, "dp": 2}. Raises ValueError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(pp|dp|tp)\s*=\s*([1-9]\d*)\s*", part)
        if match is None or match[1] in sizes:
            raise ValueError(
                f"{text!r} is not a mesh: {part!r} is wrong; write, for example, pp=4,dp=2,tp=1, each at most once"
            )
        sizes[match[1]] = int(match[2])
    return sizes


def parse_words(text: str) -> list[str]:
    """Return the words between commas. Raises ValueError."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ValueError(f"{text!r} has an empty entry; write, for example, a,b")
    return words


def parse_counts(text: str) -> list[int]:
    """Return counts in ascending order: "4,1,2" -> [1, 2, 4]. Raises ValueError."""
    words = parse_words(text)
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise ValueError(f"{word!r} must be a whole number of 1 or more")
    return sorted({*map(int, words)})


def parse_seconds(text: str) -> float:
    """Return a time above 0. Raises ValueError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"{text!r} must be a number of seconds above 0")
    return seconds


def comma_separated(values: Iterable[int]) -> str:
    """Return the form of such an option: (0, 4, 8) -> "0,4,8"."""
    return ",".join(map(str, values))


SIZE = Value("size", parse_bytes)
MEMORY = Value("memory", parse_memory)
LIMIT = Value("limit", parse_limit)
LINK = Value("link", parse_link)
MESH = Value("mesh", parse_mesh)
WORDS = Value("words", parse_words)
COUNTS = Value("counts", parse_counts)
SECONDS = Value("seconds", parse_seconds)
