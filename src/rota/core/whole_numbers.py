"""Whole microseconds and whole bytes: what times and sizes must be for every part of Rota to agree exactly."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from rota.core.errors import PlacementError

#: What a file may hold: a petabyte, or 31 years in µs; sums of many still fit into 64 bits.
LARGEST = 10**15

#: Numbers in files, see `rota.core.reading.Field.read`.
Whole: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=LARGEST)]
Signed: TypeAlias = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]


def whole(name: str, value: object, signed: bool = False) -> int:
    """`value` as an int if it is a whole number of 0 or more (any whole number if `signed`).

    Raises:
        PlacementError: It is not such a number; the message calls it `name`.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or (value < 0 and not signed):
        wanted = "a whole number" if signed else "a whole number of 0 or more"
        raise PlacementError(f"{name} is {value!r}: give {wanted} (whole microseconds, whole bytes)")
    return value


def whole_rows(value: object) -> int:
    """The examples of a micro-batch. Raises PlacementError unless it is a whole number of 1 or more."""
    if (found := whole("microbatch_rows", value)) < 1:
        raise PlacementError("microbatch_rows is 0: give the examples of one micro-batch, or None")
    return found
