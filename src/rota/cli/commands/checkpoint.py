"""`rota checkpoint`: what is in a folder of checkpoints."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rota.cli import files, json_reports
from rota.cli.arguments import add_json, add_output
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser, one_of, two_columns
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_text, progress_line
from rota.errors import PipelineError, RotaError
from rota.reading import printable, read_text, short
from rota.units import count_text, size_text

if TYPE_CHECKING:
    from rota.runtime.checkpoints.files import Saved

_DETAILS = " The command runs no code from a checkpoint, so it is safe to use on checkpoints that you do not trust."
_ACTIONS = {
    "ls": "list the checkpoints in FOLDER, oldest first",
    "verify": "compare every file with its hash, and check that every tensor is complete",
    "export": "write the model of a checkpoint, or of the newest one in FOLDER, as one safetensors file",
}


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota checkpoint` to its parser."""
    actions = parser.add_argument_group("actions", two_columns(_ACTIONS))
    actions.add_argument("action", type=one_of(ACTIONS), choices=ACTIONS, metavar="ACTION", help="ls, verify or export")
    help_text = "folder that rota.Checkpoints writes to, or one checkpoint in it: FOLDER/step-N"
    actions.add_argument("folder", metavar="FOLDER", help=help_text)
    add_output(
        parser,
        "FILE",
        "for export: model.safetensors or, with --config, a folder for it and config.json",
        writes=lambda arguments: "file" if arguments.config is None else "folder",
    )
    add_json(parser)
    help_text = (
        "for export: the model's config.json; it is copied next to model.safetensors, so that from_pretrained loads "
        "both"
    )
    parser.add_argument("--config", metavar="CONFIG.json", help=help_text)


def run(arguments: Namespace) -> int:
    """List, verify or export the checkpoints in the folder. Returns the exit code."""
    if (arguments.output is None) is (arguments.action == "export"):
        remedy = "needs -o FILE" if arguments.output is None else f"writes no file: leave out -o {arguments.output}"
        raise InputError(f"{arguments.action} {remedy}")
    if arguments.config is not None and arguments.action != "export":
        raise InputError(f"{arguments.action} writes no model: leave out --config {arguments.config}")
    require("torch", "torch")
    return ACTIONS[arguments.action](arguments)


def _ls(arguments: Namespace) -> int:
    found = _found(arguments)
    if arguments.json:
        print_json(found.to_fields())
        return 0
    for saved in found.readable:
        manifest = saved.manifest
        extra = ", ".join(f"{printable(name)}={short(value)}" for name, value in manifest.extra.items())
        line = (
            f"{_name(saved.path)}  {count_text(manifest.num_ranks, 'rank')} × "
            f"{count_text(manifest.num_replicas, 'replica')}  "
            f"{len(manifest.weights):,} weights and buffers  {saved.num_bytes:,} bytes  {extra}"
        )
        print_text(line.rstrip())
    return 0


def _verify(arguments: Namespace) -> int:
    from rota.runtime.checkpoints.contents import damages

    found = _found(arguments)
    wrong: dict[str, list[str]] = {}
    for saved in found.readable:
        with progress_line() as show:
            show(f"reading {printable(saved.path.name)} ({size_text(saved.num_bytes)}) …")
            wrong[saved.path.name] = damages(saved)
        if not arguments.json:
            files_text = count_text(len(saved.manifest.files), "file")
            whole_text = f"complete: {files_text}, {count_text(saved.num_bytes, 'byte')}"
            print_text(f"{_name(saved.path)}  {printable('; '.join(wrong[saved.path.name]) or whole_text)}")
    if arguments.json:
        print_json(found.to_fields() | {"damages": wrong})
    if damaged := [*(path.name for path, _ in found.unreadable), *(name for name, what in wrong.items() if what)]:
        raise PipelineError(f"damaged: {', '.join(damaged)}; remove them to resume from earlier ones")
    return 0


class _Found(NamedTuple):
    """The checkpoints in a folder; `unreadable` ones with the error."""

    readable: Sequence[Saved]
    unreadable: Sequence[tuple[Path, RotaError]]
    unfinished: Sequence[Path]

    def to_fields(self) -> dict[str, Any]:
        return {
            "checkpoints": [json_reports.of_checkpoint(saved) for saved in self.readable],
            "unreadable": [{"name": path.name, "error": str(error)} for path, error in self.unreadable],
            "unfinished": [path.name for path in self.unfinished],
        }


def _found(arguments: Namespace) -> _Found:
    """All checkpoints in the folder; prints a line for each that cannot be read, unless --json is given."""
    from rota.runtime.checkpoints.checkpoint_folder import unfinished_ones
    from rota.runtime.checkpoints.contents import find

    folder = Path(arguments.folder)
    found = _Found(*find(folder), [*unfinished_ones(folder)])
    if not arguments.json:
        for path in found.unfinished:
            print_text(f"{_name(path)}  incomplete, ignored by load")
        for path, error in found.unreadable:
            print_text(f"{_name(path)}  unreadable: {printable(str(error))}")
    return found


def _name(path: Path) -> str:
    return f"{printable(path.name):<12}"


def _export(arguments: Namespace) -> int:
    require("safetensors", "checkpoint")
    from rota.runtime.checkpoints.contents import export, find

    found, damaged = find(Path(arguments.folder))
    if not found:
        raise damaged[0][1]
    for _, error in damaged:
        print(f"rota checkpoint: left out: {printable(str(error))}", file=sys.stderr)
    path = Path(arguments.output)
    if arguments.config is not None:
        config = read_text(arguments.config)
        files.make_folder(arguments.output)
        path /= "model.safetensors"
    with progress_line() as show:
        show(f"writing {printable(str(path))} ({size_text(found[-1].num_bytes)} to read) …")
        num_tensors = export(found[-1], path)
    if arguments.config is not None:
        files.write(str(path.with_name("config.json")), config, quietly=arguments.json)
    if arguments.json:
        print_json({"path": str(path), "num_tensors": num_tensors, **json_reports.of_checkpoint(found[-1])})
    else:
        print_text(printable(f"Wrote {num_tensors:,} weights and buffers from {found[-1].path} to {path}."))
    return 0


ACTIONS = {"ls": _ls, "verify": _verify, "export": _export}

COMMAND = Command(
    "checkpoint",
    "list, verify or export checkpoints",
    "rota checkpoint export run/step-100 -o model.safetensors",
    add_arguments,
    run,
    _DETAILS,
)
