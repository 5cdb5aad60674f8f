"""Check where a command may write, and write there."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from rota import writing
from rota.cli.arguments import Written
from rota.cli.requirements import InputError

_PICTURES = (".html", ".png", ".svg", ".pdf")


def refuse_outputs(arguments: Namespace) -> None:
    """Raise InputError, before any work, if a command cannot write its outputs, or not in the format of their names.

    A command must not overwrite a file that it reads, and may overwrite others only with --force. `arguments.written`
    has the kind of each output argument.
    """
    given = dict(vars(arguments))
    written = given.pop("written", {})
    outputs = {path: what for name, what in written.items() if (path := given.pop(name))}
    read = [path for value in given.values() for path in (value if isinstance(value, list) else [value])]
    _refuse_twice([getattr(arguments, name) for name in written])
    for output, what in outputs.items():
        _refuse_suffix(arguments.command, output, what)
        if any(isinstance(path, str) and _same_file(path, output) for path in read):
            raise InputError(f"{output} is read by the command, and would be overwritten; write to another file")
        option = "--force (before the plan)" if arguments.command == "run" else "--force"
        refuse_taken(Path(output), arguments.force, is_folder=what == "folder", option=option)
        (_refuse_file if what in ("file", "plan", "timeline") else _refuse_folder)(output)


def _refuse_twice(outputs: list[str | None]) -> None:
    """Raise InputError if two outputs are the same file."""
    places: set[str] = set()
    for output in filter(None, outputs):
        if (place := os.path.realpath(output)) in places:
            raise InputError(f"{outputs[0]} is given for two outputs; the second would overwrite the first")
        places.add(place)


def refuse_taken(path: Path, force: bool, is_folder: bool = False, option: str = "--force") -> None:
    """Raise InputError if the path has content to lose, unless `force`."""
    if not force and _is_taken(path, is_folder):
        raise InputError(f"{path} exists already; give another name, or {option} to overwrite it")


def _is_taken(path: Path, is_folder: bool) -> bool:
    """Whether the path has content to lose; /dev/stdout has none."""
    try:
        return any(path.iterdir()) if is_folder and path.is_dir() else path.is_file()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; check the path") from None


def _refuse_file(path: str) -> None:
    """Raise InputError if the file cannot be written."""
    folder = Path(os.path.realpath(path)).parent
    if os.path.exists(path) and not os.path.isfile(path):  # /dev/stdout is written to as it is
        can_write = not os.path.isdir(path) and os.access(path, os.W_OK)
    else:
        can_write = folder.is_dir() and os.access(folder, os.W_OK)
    if not can_write:
        raise InputError(f"cannot write {path}: its folder does not exist or cannot be written to; check the path")


def _refuse_folder(path: str) -> None:
    """Raise InputError if the folder cannot be made or written to."""
    place = Path(path).absolute()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(f"cannot make the folder {path}: {there} is not a writable folder; give another by -o")


def _refuse_suffix(command: str, output: str, what: Written) -> None:
    """Raise InputError if a plan or a timeline would be written as a picture."""
    suffix = Path(output).suffix.lower()
    if what == "plan" and suffix in _PICTURES:
        picture = f"write the plan by -o plan.json, then draw it by `rota show plan.json -o {output}`"
        raise InputError(f"a plan is written as .json, or as .csv in PyTorch's form, not as {output}; {picture}")
    if what == "timeline" and suffix in (*_PICTURES, ".csv"):
        option = "--timeline" if command == "run" else "-o"
        draw = f"then draw it by `rota show timeline.json -o {output}`" if suffix != ".csv" else "a CSV holds a plan"
        raise InputError(f"a timeline is written as .json, not as {output}; write it by {option} timeline.json, {draw}")


def _same_file(a: str, b: str) -> bool:
    return os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)


def make_folder(path: str) -> None:
    """Make a folder unless it exists. Raises InputError."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}; give another by -o") from None


def write(path: str, text: str) -> None:
    """Write a text file atomically. Raises InputError."""
    try:
        writing.write_text(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; check the folder") from None
