"""`rota checkpoint`: what is in a folder of checkpoints."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rota.cli import files
from rota.errors import PipelineError
from rota.reading import printable, short

if TYPE_CHECKING:
    from rota.runtime.checkpoints.files import Saved

HELP = """ls      what is in FOLDER, in the order in which it was saved
verify  compare every file with its hash, and look whether every tensor is covered
export  the model of one checkpoint, the newest of FOLDER, as one safetensors file

None of them runs anything that is in a checkpoint: use them on checkpoints that you do not trust."""


def checkpoint(arguments: Namespace) -> int:
    if (arguments.output is None) is (arguments.action == "export"):
        told = "needs -o FILE" if arguments.output is None else f"writes no file: leave out -o {arguments.output}"
        raise files.InputError(f"{arguments.action} {told}")
    files.require("torch", "torch")
    return ACTIONS[arguments.action](arguments)


def _ls(arguments: Namespace) -> int:
    for saved in _readable(arguments.folder)[0]:
        manifest = saved.manifest
        extra = ", ".join(f"{printable(name)}={short(value)}" for name, value in manifest.extra.items())
        line = (
            f"{_name(saved.path)}  {manifest.num_ranks} ranks × {manifest.num_replicas}  "
            f"{len(manifest.weights):,} weights and buffers  {saved.num_bytes:,} bytes  {extra}"
        )
        print(line.rstrip())
    return 0


def _verify(arguments: Namespace) -> int:
    from rota.runtime.checkpoints.reading import damages

    whole, damaged = _readable(arguments.folder)
    for saved in whole:
        found = damages(saved)
        told = "; ".join(found) if found else f"whole: {len(saved.manifest.files)} files, {saved.num_bytes:,} bytes"
        print(f"{_name(saved.path)}  {printable(told)}")
        damaged += [saved.path.name] * bool(found)
    if damaged:
        raise PipelineError(f"damaged: {', '.join(damaged)}; remove them to go on from those before them")
    return 0


def _readable(folder: str) -> tuple[list[Saved], list[str]]:
    """All checkpoints that can be read, and the names of those that cannot, which are told in a line each."""
    from rota.runtime.checkpoints.folder import unfinished_ones
    from rota.runtime.checkpoints.reading import find

    found, damaged = find(Path(folder))
    for path in unfinished_ones(Path(folder)):
        print(f"{_name(path)}  not whole, left out by load")
    for path, error in damaged:
        print(f"{_name(path)}  unreadable: {printable(str(error))}")
    return found, [path.name for path, _ in damaged]


def _name(path: Path) -> str:
    return f"{printable(path.name):<12}"


def _export(arguments: Namespace) -> int:
    files.require("safetensors", "checkpoint")
    from rota.runtime.checkpoints.reading import export, find

    found, damaged = find(Path(arguments.folder))
    if not found:
        raise damaged[0][1]
    for _, error in damaged:
        print(f"rota checkpoint: left out: {printable(str(error))}", file=sys.stderr)
    num_tensors = export(found[-1], Path(arguments.output))
    print(printable(f"Wrote {num_tensors:,} weights and buffers of {found[-1].path} to {arguments.output}."))
    return 0


ACTIONS = {"ls": _ls, "verify": _verify, "export": _export}
