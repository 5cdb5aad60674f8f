"""`rota checkpoint`: what is in a folder of checkpoints."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rota.cli import files
from rota.errors import FormatError, PipelineError
from rota.reading import short

if TYPE_CHECKING:
    from rota.runtime.checkpoint_files import Saved

HELP = """ls      what is in FOLDER, in the order in which it was saved
verify  compare every file with its hash, and look whether every tensor is covered
export  the model of one checkpoint, the newest of FOLDER, as one safetensors file

None of them runs what a checkpoint names: use them on checkpoints that you do not trust."""


def checkpoint(arguments: Namespace) -> int:
    if (arguments.output is None) is (arguments.action == "export"):
        told = "needs -o FILE" if arguments.output is None else f"writes no file: leave out -o {arguments.output}"
        raise files.InputError(f"{arguments.action} {told}")
    files.require("torch", "torch")
    return ACTIONS[arguments.action](arguments)


def _ls(arguments: Namespace) -> int:
    for saved in _readable(arguments.folder)[0]:
        manifest = saved.manifest
        extra = ", ".join(f"{name}={short(value)}" for name, value in manifest.extra.items())
        print(
            f"{saved.path.name:<12}  {manifest.num_ranks} ranks × {manifest.num_replicas}  "
            f"{len(manifest.weights):,} weights and buffers  {saved.num_bytes:,} bytes  {extra}".rstrip()
        )
    return 0


def _verify(arguments: Namespace) -> int:
    from rota.runtime.checkpoint_reading import damages

    whole, damaged = _readable(arguments.folder)
    for saved in whole:
        found = damages(saved)
        told = "; ".join(found) if found else f"whole: {len(saved.manifest.files)} files, {saved.num_bytes:,} bytes"
        print(f"{saved.path.name:<12}  {told}")
        damaged += [saved.path.name] * bool(found)
    if damaged:
        raise PipelineError(f"damaged: {', '.join(damaged)}; remove them to go on from those before them")
    return 0


def _readable(folder: str) -> tuple[list[Saved], list[str]]:
    """All checkpoints that can be read, and the names of those that cannot, which are told in a line each."""
    from rota.runtime.checkpoint_files import read_saved, unfinished_ones
    from rota.runtime.checkpoint_reading import paths_in

    for path in unfinished_ones(Path(folder)):
        print(f"{path.name:<12}  not whole, left out by load")
    found: list[Saved] = []
    unreadable = []
    for path in paths_in(Path(folder)):
        try:
            found.append(read_saved(path))
        except FormatError as error:
            print(f"{path.name:<12}  unreadable: {error}")
            unreadable.append(path.name)
    return sorted(found, key=lambda saved: saved.manifest.number), unreadable


def _export(arguments: Namespace) -> int:
    files.require("safetensors", "checkpoint")
    from rota.runtime.checkpoint_reading import export, newest

    saved = newest(Path(arguments.folder))
    num_tensors = export(saved, Path(arguments.output))
    print(f"Wrote {num_tensors:,} weights and buffers of {saved.path} to {arguments.output}.")
    return 0


ACTIONS = {"ls": _ls, "verify": _verify, "export": _export}
