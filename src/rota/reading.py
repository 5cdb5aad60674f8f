"""Reading JSON that somebody else wrote: every complaint names the field, its value and what belongs there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rota.errors import FormatError

_LARGEST = 2**63 - 1  # whatever the number counts: what Python can index


def _short(value: object) -> str:
    try:
        text = json.dumps(value) if isinstance(value, (str, int, float, bool, list, dict, type(None))) else repr(value)
    except RecursionError:
        text = "nested too deep"
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class Field:
    """A value inside a JSON document and the path that leads to it, such as `plan.orders[2]`."""

    path: str
    value: Any

    def wrong(self, expected: str) -> FormatError:
        return FormatError(f"{self.path} is {_short(self.value)}; expected {expected}")

    def __getitem__(self, name: str) -> Field:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if name not in self.value:
            raise FormatError(f"{self.path} has no field {name!r}; it has {', '.join(self.value) or 'none'}")
        return Field(f"{self.path}.{name}", self.value[name])

    def __contains__(self, name: str) -> bool:
        return isinstance(self.value, dict) and name in self.value

    def __iter__(self) -> Iterator[Field]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return (Field(f"{self.path}[{i}]", value) for i, value in enumerate(self.value))

    def integer(self, minimum: int | None = None) -> int:
        # bool is an int to Python, never to a reader of the file.
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            raise self.wrong("a whole number")
        if minimum is not None and self.value < minimum:
            raise self.wrong(f"{minimum} or more")
        if abs(self.value) > _LARGEST:
            raise self.wrong(f"{_LARGEST} or less")
        return self.value

    def integer_or_none(self, minimum: int | None = None) -> int | None:
        return None if self.value is None else self.integer(minimum)

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def integers(self, minimum: int | None = None) -> tuple[int, ...]:
        return tuple(item.integer(minimum) for item in self)


def parse(text: str, what: str) -> Field:
    """The document of type `what` ("plan", "timeline", …); raises FormatError if it is another or no JSON."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise FormatError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise FormatError("not a file of ours: nested too deep") from None
    except ValueError as error:  # numbers of more digits than Python converts
        raise FormatError(f"not JSON that can be read: {error}") from None
    if not isinstance(value, dict) or value.get("rota") != what:
        kind = value.get("rota") if isinstance(value, dict) else None
        told = f'it says "rota": {_short(kind)}' if kind is not None else f'it has no "rota": "{what}"'
        raise FormatError(f"not a {what} file: {told}")
    return Field(what, value)


def dump(what: str, fields: dict[str, Any]) -> str:
    """One line a field; lists of anything but numbers get one line an entry: easy to read and to diff."""
    lines = [f'  "rota": "{what}"']
    for name, value in fields.items():
        if isinstance(value, list) and value and isinstance(value[0], (list, dict, str)):
            body = ",\n".join("    " + json.dumps(entry) for entry in value)
            lines.append(f'  "{name}": [\n{body}\n  ]')
        else:
            lines.append(f'  "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"
