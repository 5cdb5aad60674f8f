"""Arguments that several commands share: their types, and the options themselves."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

from rota.cli.parser import Parser
from rota.cli.sizes import parse_bytes, parse_link, parse_mesh

T = TypeVar("T")

# --- types: a text as what it means -----------------------------------------------------------------------------------


def argument_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as an argument's type: argparse shows the message of its ValueError."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


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


def add_cores(parser: Parser) -> None:
    """--cores."""
    parser.add_argument("--cores", type=number(1), help="of the one machine that all ranks share (default: enough)")


def add_time_limit(parser: Parser, help: str, default: float | None = None) -> None:
    """--time-limit."""
    parser.add_argument("--time-limit", type=seconds, default=default, metavar="S", help=help)
