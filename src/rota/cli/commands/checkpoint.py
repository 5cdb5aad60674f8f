"""`rota checkpoint`: what is in a folder of checkpoints."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rota.cli import files
from rota.cli.arguments import add_output
from rota.cli.parser import Command, Parser, one_of, two_columns
from rota.cli.requirements import InputError, require
from rota.errors import PipelineError
from rota.reading import printable, read_text, short
from rota.units import count_text

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
    actions.add_argument("action", type=one_of(ACTIONS), metavar="ACTION", help="ls, verify or export")
    help_text = "folder that rota.Checkpoints writes to, or one checkpoint in it: FOLDER/step-N"
    actions.add_argument("folder", metavar="FOLDER", help=help_text)
    add_output(
        parser,
        "FILE",
        "for export: model.safetensors or, with --config, a folder for it and config.json",
        writes="file or folder",
    )
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
    for saved in _readable(arguments.folder)[0]:
        manifest = saved.manifest
        extra = ", ".join(f"{printable(name)}={short(value)}" for name, value in manifest.extra.items())
        line = (
            f"{_name(saved.path)}  {count_text(manifest.num_ranks, 'rank')} × "
            f"{count_text(manifest.num_replicas, 'replica')}  "
            f"{len(manifest.weights):,} weights and buffers  {saved.num_bytes:,} bytes  {extra}"
        )
        print(line.rstrip())
    return 0


def _verify(arguments: Namespace) -> int:
    from rota.runtime.checkpoints.contents import damages

    whole, damaged = _readable(arguments.folder)
    for saved in whole:
        found = damages(saved)
        whole_text = f"complete: {len(saved.manifest.files)} files, {saved.num_bytes:,} bytes"
        print(f"{_name(saved.path)}  {printable('; '.join(found) or whole_text)}")
        damaged += [saved.path.name] * bool(found)
    if damaged:
        raise PipelineError(f"damaged: {', '.join(damaged)}; remove them to resume from earlier ones")
    return 0


def _readable(folder: str) -> tuple[list[Saved], list[str]]:
    """All checkpoints that can be read, and the names of those that cannot; prints one line for each of these."""
    from rota.runtime.checkpoints.checkpoint_folder import unfinished_ones
    from rota.runtime.checkpoints.contents import find

    found, damaged = find(Path(folder))
    for path in unfinished_ones(Path(folder)):
        print(f"{_name(path)}  incomplete, ignored by load")
    for path, error in damaged:
        print(f"{_name(path)}  unreadable: {printable(str(error))}")
    return found, [path.name for path, _ in damaged]


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
    num_tensors = export(found[-1], path)
    if arguments.config is not None:
        files.write(str(path.with_name("config.json")), config)
    print(printable(f"Wrote {num_tensors:,} weights and buffers from {found[-1].path} to {path}."))
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
