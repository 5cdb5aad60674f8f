"""Read untrusted JSON: every error names the field, its value and what is expected.

`docs/untrusted-files.md` lists what is checked.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from io import FileIO
from typing import Annotated, Any, TypeAlias, TypeVar, overload

import msgspec

from rota.core.errors import FormatError, PlacementError, RotaError

#: What a file may hold: a petabyte, or 31 years in µs; sums of many still fit into 64 bits.
LARGEST = 10**15
LARGEST_BYTES = 256 * 1024**2  # per file
LONGEST_NAME = 1000  # characters
_PIECE_BYTES = 1024**2  # Python allocates the requested size in advance
LATEST_US = 2**63 - 1  # for the times of a timeline, which are such sums

#: Remedies and uses, by the type of file.
_REMEDIES = {
    "plan": "give what `rota plan -o plan.json` or Plan.to_json() wrote",
    "timeline": "give what `rota show --timeline timeline.json` or Timeline.to_json() wrote",
    "costs": "give what `rota calibrate … --costs costs.json` or Costs.to_json() wrote, with the costs of each stage",
    "profile": "give what `rota profile -o profile.json` wrote",
    "layers": "give what LayerCosts.to_json() wrote",
    "sizes": "give what `rota profile --lengths … -o sizes.json` or SizeModel.to_json() wrote",
    "cluster": "give what `rota profile links -o cluster.json` or Cluster.to_json() wrote",
    "links": "remove it: links are measured again",
    "checkpoint": "give the rota.json of a checkpoint",
    "communication": "make the profile again",
    "problem": "give one of the folder problems/ in Rota's repository",
}
_USES = {
    "plan": "a plan is for `rota check`, `rota show` and `rota run`",
    "timeline": "a timeline is for `rota show`, `rota explain` and `rota compare`",
    "costs": "costs of stages are for `rota plan NAME --costs`",
    "profile": "a profile of layers is for `rota autoplan --profile`, which makes stages of them",
    "layers": "costs of layers are for rota.autoplan",
    "sizes": "costs by size are for SizeModel.from_json and rota.Planner",
    "cluster": "a cluster is for Cluster.from_json and rota.place",
    "links": "it keeps what links_of_this_machine has measured",
    "checkpoint": "a checkpoint is for `rota checkpoint`, which takes its folder",
    "problem": "a reference problem is for problems/run.py",
}


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def open_file(path: str | os.PathLike[str], *, follow: bool = True) -> FileIO:
    """Open a regular file to read it; with `follow`, also by a symbolic link.

    Anything else is refused without being opened: to open a pipe may wait for ever, and a device may act on it.

    Raises:
        FormatError: It is no regular file; the message names it and what it is.
        OSError: It cannot be opened.
        ValueError: The path has a null character.
    """
    require_regular(path, follow=follow)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)  # it may be another one by now
    except FormatError:
        os.close(descriptor)
        raise
    return FileIO(descriptor)


def require_regular(path: str | os.PathLike[str], *, follow: bool = True) -> None:
    """Raises FormatError as `open_file` does, OSError if there is no such file."""
    _require_regular(path, os.stat(path, follow_symlinks=follow).st_mode)


def _require_regular(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise FormatError(f"{path} is not a regular file but {kind}; give a file")


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file in UTF-8, with or without a byte order mark.

    Raises:
        FormatError: The file cannot be read, is larger than `LARGEST_BYTES`, or is not UTF-8; the message names it.
    """
    try:
        with open_file(path) as file:
            data = read_bytes(file.read, LARGEST_BYTES)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror}; check the path") from None
    except ValueError:  # a null character
        raise FormatError(f"cannot read {str(path)!r}: this is not a path; check it") from None
    if len(data) > LARGEST_BYTES:
        raise FormatError(f"cannot read {path}: it has more than {LARGEST_BYTES:,} bytes; give a smaller one")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"cannot read {path}: it is not a text file in UTF-8 (byte {error.start})") from None


def read_bytes(read: Callable[[int], bytes | None], most: int) -> bytearray:
    """The bytes from a stream's `read`, at most `most + 1` of them: that many mean that the stream is too long."""
    data = bytearray()
    while len(data) <= most and (piece := read(min(most + 1 - len(data), _PIECE_BYTES))):
        data += piece
    return data


def printable(text: str) -> str:
    r"""The text in one line; characters that could move a terminal's cursor or hide others are written as \x1b."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def short(value: object) -> str:
    """A value in one line of at most 60 printable characters, for error messages."""
    try:
        is_json = isinstance(value, (str, int, float, bool, list, dict, type(None)))
        text = json.dumps(value, default=repr) if is_json else printable(repr(value))
    except RecursionError:
        text = "nested too deep"
    return text if len(text) <= 60 else text[:57] + "..."


def _names(names: Iterable[str]) -> str:
    """Names of an object's fields in a bounded text, whatever they contain."""
    text = ", ".join(name if name.isidentifier() and name.isascii() else short(name) for name in names)
    return text if len(text) <= 400 else text[:397] + "..."


#: For one line: nothing that moves a terminal's cursor, or hides or reorders what is beside it.
Name: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=LONGEST_NAME,
        pattern="^[^\\x00-\\x1f\\x7f-\\xa0\\xad\\u061c\\u200b-\\u200f\\u2028-\\u202f\\u205f-\\u206f\\ud800-\\uf8ff\\ufeff\\ufff0-\\ufffb\U000e0000-\U0010ffff]+$",
    ),
]
#: Whole microseconds and whole bytes, so that every part of Rota agrees exactly.
Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
Signed: TypeAlias = Annotated[int, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
_T = TypeVar("_T")


def whole(name: str, value: object, signed: bool = False) -> int:
    """`value` as an int if it is a whole number of 0 or more (any whole number if `signed`).

    Raises:
        PlacementError: It is not such a number; the message calls it `name`.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or (value < 0 and not signed):
        expected = "a whole number" if signed else "a whole number of 0 or more"
        raise PlacementError(f"{name} is {value!r}: give {expected} (whole microseconds, whole bytes)")
    return value


def whole_rows(value: object) -> int:
    """The examples of a micro-batch. Raises PlacementError unless it is a whole number of 1 or more."""
    if (rows := whole("microbatch_rows", value)) < 1:
        raise PlacementError("microbatch_rows is 0: give the examples of one micro-batch, or None")
    return rows


@dataclass(frozen=True, slots=True)
class Field:
    """A value in a JSON document, with its path.

    Its methods return the value as a type, and raise FormatError if it is not of that type.

    Attributes:
        path: Where the value is, such as `plan.orders[2]`.
        value: The value as `json` reads it.
    """

    path: str
    value: Any

    def wrong(self, expected: str) -> FormatError:
        """The error that this value is not `expected`."""
        return FormatError(f"{self.path} is {short(self.value)}; expected {expected}")

    def __getitem__(self, name: str) -> Field:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if name not in self.value:
            raise FormatError(f"{self.path} has no field {name!r}; it has {_names(self.value) or 'none'}")
        return Field(f"{self.path}.{name}", self.value[name])

    def __contains__(self, name: str) -> bool:
        return isinstance(self.value, dict) and name in self.value

    def __iter__(self) -> Iterator[Field]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return (Field(f"{self.path}[{i}]", value) for i, value in enumerate(self.value))

    @overload
    def read(self, into: type[_T]) -> _T: ...
    @overload
    def read(self, into: Any) -> Any: ...
    def read(self, into: Any) -> Any:
        """This value as a noun or a struct, whose annotations say what it must be.

        Raises:
            FormatError: It is something else; the message names the field, its value and what is expected. Also if a
                noun has no such field.
        """
        if is_dataclass(into):
            self.refuse_others(("rota", *(field.name for field in fields(into))))
        value = self.value
        if isinstance(value, dict) and "rota" in value:
            value = {name: inner for name, inner in value.items() if name != "rota"}
        try:
            return msgspec.convert(value, into)
        except msgspec.ValidationError as error:
            message, path = _PLACE.findall(str(error))[0]
            field = Field(self.path + path, _inside(self.value, path))
            if missing := re.fullmatch(r"Object missing required field `(\w+)`?", message):
                field[missing[1]]
            if unknown := re.fullmatch(r"Object contains unknown field `(.*?)`?", message):
                raise FormatError(
                    f"{field.path} has the field {short(unknown[1])}, which is not known there; remove or rename it"
                ) from None
            expected = message.removeprefix("Expected ").split(", got ")[0]
            for pattern, words in _WORDS:
                expected = re.sub(pattern, words, expected)
            raise field.wrong(expected) from None

    def refuse_others(self, names: Iterable[str]) -> None:
        """Raise FormatError if an object has other fields than these, such as misspelled ones."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        for name, value in self.value.items():
            if name not in names:
                raise FormatError(
                    f"{self.path} has the field {short(name)} = {short(value)}, which is not one of "
                    f"{', '.join(names)}; remove or rename it"
                )


#: An error of msgspec's: what it expects, and where; of a wrong name in an object, the object's place.
_PLACE = re.compile(r"\A(.*?)(?: - at `(?:key` in `)?\$(.*)`)?\Z", re.DOTALL)
#: What msgspec expects, in our words.
_WORDS = (
    (r"`\w+` >= (\S+)", r"\1 or more"),
    (r"`\w+` <= (\S+)", r"\1 or less"),
    (r"`array` of length (\S+)", r"a list of length \1"),
    (r"`str` matching regex '\^\[0-9\].*", "a stage and one of F B I W R O L, such as 0F"),
    (r"`str` (matching regex|of length) .*", f"a name of 1 to {LONGEST_NAME:,} printable characters"),
    (r"\bint\b", "a whole number"),
    (r"\bfloat\b", "a number"),
    (r"\bstr\b", "a text"),
    (r"\bbool\b", "true or false"),
    (r"\barray\b", "a list"),
    (r"\bobject\b", "an object"),
    (r" \| ", " or "),
    ("`", ""),
)


def _inside(value: Any, path: str) -> Any:
    """What is at a path such as `.orders[2]`; of an entry of an object, whose name msgspec leaves out, the object."""
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path.partition("[...]")[0]):
        value = value[name] if name else value[int(index)]
    return value


def to_fields(file: msgspec.Struct) -> dict[str, Any]:
    """The fields of a struct in JSON, without those that say nothing; those that it inherits come last."""
    names = (name for base in type(file).__mro__ for name in vars(base).get("__annotations__", ()))
    values: dict[str, Any] = msgspec.to_builtins(file)
    return {name: values[name] for name in names if name in values}


def parse(text: str, *types: str) -> Field:
    """The document in a JSON text whose type is one of `types` ("plan", "timeline", …). Raises FormatError if not."""
    value = load(text)
    kind = value.get("rota") if isinstance(value, dict) else None
    if kind not in types:
        reason = f'it has no "rota": "{types[0]}"' if kind is None else f'it says "rota": {short(kind)}'
        use = f" ({_USES[kind]})" if isinstance(kind, str) and kind in _USES else ""
        raise FormatError(f"not a {' or '.join(types)} file: {reason}{use}; {_REMEDIES[types[0]]}")
    return Field(kind, value)


def load(text: str) -> Any:
    """The value of a JSON text. Raises FormatError, also for NaN, infinite numbers and duplicate fields."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_number, parse_float=_number)
        if "\\ud" in text or "\\uD" in text:  # perhaps half of a character
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise FormatError(
            f"it has half of a character (a lone surrogate), \\u{ord(error.object[error.start]):x}; remove it"
        ) from None
    except json.JSONDecodeError as error:
        raise FormatError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise FormatError("not a file of Rota: nested too deep") from None
    except ValueError as error:  # numbers with more digits than Python converts
        raise FormatError(f"not JSON that can be read: {error}") from None


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise FormatError(f"it holds the number {short(text)}; write finite numbers")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields_by_name = dict(pairs)
    if len(fields_by_name) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise FormatError(f"it has an object with two fields {short(twice)}; remove one of them")
    return fields_by_name


def dump(kind: str, content: dict[str, Any] | msgspec.Struct, read: Callable[[str], object] | None = None) -> str:
    """JSON text of type `kind`: one line per field, and one per entry of a list unless it is a list of numbers.

    `read` reads such a text. Raises FormatError if it refuses this one: a file that is written can be read again.
    """
    lines = [f'  "rota": "{kind}"']
    for name, value in (to_fields(content) if isinstance(content, msgspec.Struct) else content).items():
        if isinstance(value, list | tuple) and value and isinstance(value[0], (list, tuple, dict, str)):
            body = ",\n".join("    " + json.dumps(entry) for entry in value)
            lines.append(f'  "{name}": [\n{body}\n  ]')
        else:
            lines.append(f'  "{name}": {json.dumps(value)}')
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if read is not None:
        if len(text) > LARGEST_BYTES:
            raise FormatError(
                f"the {kind} file is not written: it would have {len(text):,} bytes, and only {LARGEST_BYTES:,} can "
                f"be read again"
            )
        try:
            read(text)
        except RotaError as error:
            raise FormatError(f"the {kind} file is not written, because it could not be read again: {error}") from None
    return text
