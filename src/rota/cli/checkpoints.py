"""`rota checkpoint`: what is in a folder of checkpoints."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rota.cli import files
from rota.errors import PipelineError

HELP = """ls      what is in FOLDER, in the order in which it was saved
verify  compare every file with its hash, and look whether every tensor is covered
export  the model of one checkpoint, the newest of FOLDER, as one safetensors file

verify and export unpickle what PyTorch wrote: use them on checkpoints that you trust."""


def checkpoint(arguments: Namespace) -> int:
    if (arguments.output is None) is (arguments.action == "export"):
        told = "needs -o FILE" if arguments.output is None else f"writes no file: leave out -o {arguments.output}"
        raise files.InputError(f"{arguments.action} {told}")
    files.require("torch", "torch")
    return ACTIONS[arguments.action](arguments)


def _ls(arguments: Namespace) -> int:
    from rota.runtime.checkpoint_reading import find

    _tell_unfinished(Path(arguments.folder))
    for saved in find(Path(arguments.folder)):
        manifest = saved.manifest
        extra = ", ".join(f"{name}={value}" for name, value in manifest.extra.items())
        print(
            f"{saved.path.name:<12}  {manifest.num_ranks} ranks × {manifest.num_replicas}  "
            f"{len(manifest.weights):,} weights and buffers  {saved.num_bytes:,} bytes  {extra}".rstrip()
        )
    return 0


def _verify(arguments: Namespace) -> int:
    from rota.runtime.checkpoint_reading import damages, find

    _tell_unfinished(Path(arguments.folder))
    damaged = []
    for saved in find(Path(arguments.folder)):
        found = damages(saved)
        told = "; ".join(found) if found else f"whole: {len(saved.manifest.files)} files, {saved.num_bytes:,} bytes"
        print(f"{saved.path.name:<12}  {told}")
        damaged += [saved.path.name] * bool(found)
    if damaged:
        raise PipelineError(f"damaged: {', '.join(damaged)}; remove them to go on from those before them")
    return 0


def _export(arguments: Namespace) -> int:
    files.require("safetensors", "checkpoint")
    from rota.runtime.checkpoint_reading import export, find

    files.require_folder(arguments.output)
    saved = find(Path(arguments.folder))[-1]
    num_tensors = export(saved, Path(arguments.output))
    print(f"Wrote {num_tensors:,} weights and buffers of {saved.path} to {arguments.output}.")
    return 0


def _tell_unfinished(folder: Path) -> None:
    from rota.runtime.checkpoint_files import unfinished_ones

    for path in unfinished_ones(folder):
        print(f"{path.name:<12}  not whole, left out by load")


ACTIONS = {"ls": _ls, "verify": _verify, "export": _export}
