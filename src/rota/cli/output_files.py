"""Where a command may write, and writing there."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from rota import writing
from rota.cli.arguments import Written
from rota.cli.requirements import InputError

_PICTURES = (".html", ".png", ".svg", ".pdf")


def refuse_outputs(arguments: Namespace) -> None:
    """Raises InputError, before any work, where a command could not write, or not what the file's name promises.

    It may not overwrite what it reads, and other files with --force alone. `arguments.written` has what each of its
    output arguments writes.
    """
    given = dict(vars(arguments))
    written = given.pop("written", {})
    outputs = {path: what for name, what in written.items() if (path := given.pop(name))}
    read = [path for value in given.values() for path in (value if isinstance(value, list) else [value])]
    _refuse_twice([getattr(arguments, name) for name in written])
    for output, what in outputs.items():
        _refuse_suffix(arguments.command, output, what)
        if any(isinstance(path, str) and _same_file(path, output) for path in read):
            raise InputError(f"{output} is what the command reads, and would be lost; write to another file")
        option = "--force (before the plan)" if arguments.command == "run" else "--force"
        if what == "file or folder":  # a folder where --config goes into it
            what = "file" if arguments.config is None else "folder"
        refuse_taken(Path(output), arguments.force, is_folder=what == "folder", option=option)
        (_refuse_file if what in ("file", "plan", "timeline") else _refuse_folder)(output)


def _refuse_twice(outputs: list[str | None]) -> None:
    """Raises InputError where two outputs are one file."""
    places: set[str] = set()
    for output in filter(None, outputs):
        if (place := os.path.realpath(output)) in places:
            raise InputError(f"{outputs[0]} is given for two things; the second would be written over the first")
        places.add(place)


def refuse_taken(path: Path, force: bool, is_folder: bool = False, option: str = "--force") -> None:
    """Raises InputError where there is something to lose, unless `force`."""
    if not force and _is_taken(path, is_folder):
        raise InputError(f"{path} is there already; give another name, or {option} to write over it")


def _is_taken(path: Path, is_folder: bool) -> bool:
    """Whether there is anything to lose; not so in /dev/stdout."""
    try:
        return any(path.iterdir()) if is_folder and path.is_dir() else path.is_file()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; check the path") from None


def _refuse_file(path: str) -> None:
    """Raises InputError where no file can be written."""
    folder = Path(os.path.realpath(path)).parent
    if os.path.exists(path) and not os.path.isfile(path):  # /dev/stdout is written to as it is
        can_write = not os.path.isdir(path) and os.access(path, os.W_OK)
    else:
        can_write = folder.is_dir() and os.access(folder, os.W_OK)
    if not can_write:
        raise InputError(f"cannot write {path}: there is no such folder that can be written to; check the path")


def _refuse_folder(path: str) -> None:
    """Raises InputError where no folder can be made, or written into."""
    place = Path(path).absolute()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(f"cannot make the folder {path}: {there} is none that can be written to; give another by -o")


def _refuse_suffix(command: str, output: str, what: Written) -> None:
    """Raises InputError for a plan or a timeline in the form of a picture."""
    suffix = Path(output).suffix.lower()
    if what == "plan" and suffix in _PICTURES:
        picture = f"write the plan by -o plan.json, then draw it by `rota show plan.json -o {output}`"
        raise InputError(f"a plan is written as .json, or as .csv in PyTorch's form, not as {output}; {picture}")
    if what == "timeline" and suffix in (*_PICTURES, ".csv"):
        option = "--timeline" if command == "run" else "-o"
        draw = f"then draw it by `rota show timeline.json -o {output}`" if suffix != ".csv" else "a CSV is of a plan"
        raise InputError(f"a timeline is written as .json, not as {output}; write it by {option} timeline.json, {draw}")


def _same_file(a: str, b: str) -> bool:
    return os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)


def make_folder(path: str) -> None:
    """Make a folder, if it is not there. Raises InputError."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}; give another by -o") from None


def write(path: str, text: str) -> None:
    """Write a text file whole or not at all. Raises InputError."""
    try:
        writing.write_text(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; check the folder") from None
