"""Numbers as whole numbers of 64 bits in the same order, for messages that are reduced to their maxima."""

from __future__ import annotations

import struct

MOST_BITS = 2**63 - 1


def bits_of(number: float) -> int:
    """The bits of a number of 0 or more, as an int: in the numbers' order, with nan above them all."""
    bits: int = struct.unpack("<q", struct.pack("<d", abs(number)))[0]
    return bits


def number_of(bits: int) -> float:
    """The number that has these bits."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number
