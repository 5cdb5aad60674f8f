"""Arguments that several commands share: their types, and the options themselves."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Literal, TypeVar

from rota.cli.parser import Parser

T = TypeVar("T")

_TIMES_US = {"us": 1, "µs": 1, "ms": 1000, "s": 1_000_000}
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}

# --- types: a text as what it means -----------------------------------------------------------------------------------


def argument_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as an argument's type: argparse shows the message of its ValueError."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def parse_bytes(text: str) -> int:
    """Return bytes: "40GB" -> 40000000000, "512MiB" -> 536870912, "1000" -> 1000. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmgt]i?)b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size; write bytes, or such as 40GB or 512MiB")
    number, unit = Fraction(match[1]), match[2]
    if not unit and number.denominator > 1:
        raise ValueError(f"{text!r} is no whole number of bytes; write such as {int(number)}, or {match[1]}GB")
    return int(number * (_UNITS | _BINARY)[unit])  # down: a limit is not to be exceeded by what a fraction adds


def parse_link(text: str) -> tuple[int, int | None]:
    """Return latency in µs and bytes per µs: "5us,50GB/s" -> (5, 50000); either may be left out. Raises ValueError."""
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
    """Return sizes by dim: "pp=4,dp=2" -> {"pp": 4, "dp": 2}. Raises ValueError."""
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(pp|dp|tp)\s*=\s*([1-9]\d*)\s*", part)
        if match is None or match[1] in found:
            raise ValueError(f"{text!r} is no mesh: {part!r} is wrong; write such as pp=4,dp=2,tp=1, each at most once")
        found[match[1]] = int(match[2])
    return found


size = argument_type(parse_bytes)
link = argument_type(parse_link)
mesh = argument_type(parse_mesh)


def number(minimum: int) -> Callable[[str], int]:
    """A whole number of `minimum` or more."""

    @argument_type
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise ValueError(f"{text!r} must be a whole number of {minimum} or more")
        return int(text)

    return parse


def rows(text: str) -> list[int]:
    """Rows per micro-batch, such as 1,2,4."""
    return sorted({number(1)(part.strip()) for part in text.split(",")})


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return found


def comma_separated(values: Iterable[int]) -> str:
    """(0, 4, 8) -> "0,4,8", as such an argument is given."""
    return ",".join(map(str, values))


# --- options ----------------------------------------------------------------------------------------------------------

#: What an output is: it decides which names are refused, and whether a folder is made.
Written = Literal["file", "plan", "timeline", "folder", "files in a folder"]


def add_output(
    parser: Parser,
    metavar: str,
    help: str,
    *,
    writes: Written = "file",
    default: str | None = None,
    required: bool = False,
) -> None:
    """-o and --force."""
    parser.add_argument("-o", "--output", metavar=metavar, default=default, required=required, help=help)
    add_force(parser)
    parser.set_defaults(written={"output": writes})


def add_force(parser: Parser) -> None:
    """--force."""
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


def add_model_options(parser: Parser) -> None:
    """--cuts and --length."""
    help_text = "where a model without CutPoints may be cut, such as 'transformer.h.*' (default: before its blocks)"
    parser.add_argument("--cuts", type=lambda text: text.split(","), metavar="PATTERN,…", help=help_text)
    help_text = "tokens per row, where MODEL.py makes no batch (default: 1024, or as many as the model takes)"
    parser.add_argument("--length", type=number(1), metavar="N", help=help_text)


def add_cores(parser: Parser) -> None:
    """--cores."""
    parser.add_argument("--cores", type=number(1), help="of the one machine that all ranks share (default: enough)")


def add_time_limit(parser: Parser, help: str, default: float | None = None) -> None:
    """--time-limit."""
    parser.add_argument("--time-limit", type=seconds, default=default, metavar="S", help=help)
