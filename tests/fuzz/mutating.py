"""Files with something wrong in them: values, lines, cells or bytes that are others, elsewhere, there twice or gone."""

import json
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from random import Random
from typing import Any

_VALUES = (
    *(0, 1, -1, 2, 3, 7, 1.5, 1e999, float("nan"), 2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**20, 10**400, 10**9, 10**12),
    *(True, False, None, "", "0F", "0F0", "1B", "7W9", "999999999F", "\ud800", "\u0663F0", "a\x1b[2J", "y" * 2000),
    *([], [0], [[0]], [0, 0], ["0F", "1F", 0], {}, {"rota": "plan"}),
)
_SCRAPS = ("", ",", ":", '"', "[", "}", " ", "\n", "\x00", "é", "\ufeff", "0F", "9", "9" * 5000, "[" * 3000)
_RAW = (b"\xff", b"\xfe\xff", b"\x00", b"\xef\xbb\xbf", b"\r", b"\xed\xa0\x80", b"\x1f\x8b", b"NaN", b"1e400")
_CELLS = (
    *("", "0F0", "1B1", "0I0", "0W0", "0R0", "0SEND_F0", "1RECV_F0", "0UNSHARD", "0F999999999", "999999999F0"),
    "(0F1;1B0)OVERLAP_F_B",
)


def json_mutant(text: str, chooser: Random, others: Sequence[str] = ()) -> str:
    """A document with one to three changes; values may come from `others` too."""
    document = json.loads(text)
    for _ in range(chooser.choice((1, 1, 1, 2, 3))):
        places = list(_places(document))
        if places:
            _change(*chooser.choice(places), places, others, chooser)
    mutant = json.dumps(document)
    return mutant if chooser.random() < 0.97 else _field_twice(mutant, chooser)


def _change(holder: Any, key: Any, places: list[tuple[Any, Any]], others: Sequence[str], chooser: Random) -> None:
    value, (other, other_key) = holder[key], chooser.choice(places)
    change = chooser.random()
    if change < 0.08:
        del holder[key]
    elif change < 0.16 and isinstance(holder, list):
        holder.insert(key, deepcopy(value))
    elif change < 0.34:
        holder[key] = deepcopy(other[other_key])
        if change < 0.26:
            other[other_key] = deepcopy(value)
    elif change < 0.4 and others:
        holder[key] = chooser.choice(list(_values(json.loads(chooser.choice(others)))))
    elif change < 0.85 and isinstance(value, (int, str)) and not isinstance(value, bool):
        holder[key] = _near(value, chooser)
    else:
        holder[key] = deepcopy(chooser.choice(_VALUES))


def _near(value: int | str, chooser: Random) -> int | str:
    """Another number, or the same words in another order, some of them there twice or gone."""
    if isinstance(value, int):
        return max(value + chooser.choice((-2, -1, 1, 2, 10)), 0) * chooser.choice((1, 1, 1, 2, 10**6))
    words = value.split(" ")
    at, to = chooser.randrange(len(words)), chooser.randrange(len(words))
    change = chooser.choice(("swap", "drop", "twice", "move", "digit"))
    if change == "swap":
        words[at], words[to] = words[to], words[at]
    elif change == "digit":
        words[at] = re.sub(r"\d", lambda _: str(chooser.randrange(5)), words[at], count=1)
    elif change == "twice":
        words.insert(to, words[at])
    else:
        word = words.pop(at)
        words[to:to] = [word] * (change == "move")
    return " ".join(words)


def _field_twice(text: str, chooser: Random) -> str:
    name = chooser.choice(re.findall(r'"(\w+)":', text) or ["rota"])
    return text.replace("{", f'{{"{name}": {json.dumps(chooser.choice(_VALUES))}, ', 1)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key or index) of every value in a document but itself."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _values(value: Any) -> Iterator[Any]:
    yield value
    yield from (holder[key] for holder, key in _places(value))


def csv_mutant(text: str, chooser: Random, others: Sequence[str] = ()) -> str:
    """A table with one to three changes; lines may come from `others` too."""
    lines = text.split("\n")
    for _ in range(chooser.choice((1, 1, 2, 3))):
        _change_line(lines, others, chooser)
    return chooser.choice(("\n", "\n", "\n", "\r\n")).join(lines)


def _change_line(lines: list[str], others: Sequence[str], chooser: Random) -> None:
    at, to = chooser.randrange(len(lines)), chooser.randrange(len(lines))
    change = chooser.random()
    if change < 0.06 and len(lines) > 1:
        del lines[at]
    elif change < 0.12:
        lines.insert(to, lines[at])
    elif change < 0.2:
        lines[at], lines[to] = lines[to], lines[at]
    elif change < 0.25 and others:
        lines[at] = chooser.choice(chooser.choice(others).split("\n"))
    else:
        cells = lines[at].split(",")
        _change_cell(cells, chooser.choice(",".join(lines).split(",")), chooser)
        lines[at] = ",".join(cells)


def _change_cell(cells: list[str], another: str, chooser: Random) -> None:
    at, to = chooser.randrange(len(cells)), chooser.randrange(len(cells))
    change = chooser.choice(("swap", "near", "drop", "twice", "another", "odd"))
    if change == "swap" or (change == "near" and at + 1 == len(cells)):
        cells[at], cells[to] = cells[to], cells[at]
    elif change == "near":
        cells[at], cells[at + 1] = cells[at + 1], cells[at]
    elif change == "drop":
        del cells[at]
    else:
        cells.insert(to, {"twice": cells[at], "another": another, "odd": chooser.choice(_CELLS)}[change])


def text_mutant(text: str, chooser: Random, others: Sequence[str] = ()) -> str:
    """A text in which a slice has become a scrap, or that ends as one of `others`."""
    start = chooser.randint(0, len(text))
    if others and chooser.random() < 0.2:
        other = chooser.choice(others)
        return text[:start] + other[chooser.randint(0, len(other)) :]
    return text[:start] + chooser.choice(_SCRAPS) + text[start + chooser.randint(0, 5) :]


def piece_mutant(text: str, chooser: Random) -> str:
    """A text of which one to three short pieces are gone, there twice or elsewhere."""
    for _ in range(chooser.choice((1, 1, 2, 3))):
        start, to = chooser.randint(0, len(text)), chooser.randint(0, len(text))
        piece = text[start : start + chooser.choice((1, 1, 2, 4))]
        if chooser.random() < 0.6:
            text = text[:start] + text[start + len(piece) :]
        if chooser.random() < 0.7:
            text = text[:to] + piece + text[to:]
    return text


def byte_mutant(data: bytes, chooser: Random) -> bytes:
    """A file in which a byte, or a piece, is another, there twice or gone."""
    start = chooser.randint(0, len(data))
    end = min(start + chooser.choice((0, 1, 1, 2, 50)), len(data))
    middle = chooser.choice((b"", data[start:end] * 2, chooser.randbytes(1), chooser.choice(_RAW)))
    return data[:start] + middle + data[end:]
