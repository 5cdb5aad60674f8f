"""`rota checkpoint`: what is in a folder of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from rota.cli import common, files, reports
from rota.cli.command import Group, Options, command
from rota.cli.reports import print_json
from rota.cli.requirements import require
from rota.cli.screen import note, print_text, progress_line
from rota.core.errors import PipelineError, RotaError
from rota.core.reading import printable, read_text
from rota.core.text import count_text, size_text

if TYPE_CHECKING:
    from rota.runtime.checkpoints.saved import Saved


@click.group(cls=Group)
def checkpoint() -> None:
    """List, verify or export checkpoints.

    The command runs no code from a checkpoint, so it is safe to use on checkpoints that you do not trust.
    """


_folder = common.argument(
    "folder", metavar="FOLDER", help="folder that rota.Checkpoints writes to, or one checkpoint in it: FOLDER/step-N"
)


@command("rota checkpoint ls run", group=checkpoint)
@_folder
@common.json
def ls(options: Options) -> None:
    """List the checkpoints in FOLDER, oldest first."""
    checkpoints = _read(options)
    if options.json:
        print_json(checkpoints.to_fields())
        return
    for saved in checkpoints.readable:
        manifest = saved.manifest
        extra = ", ".join(printable(f"{name}={json.dumps(value)}") for name, value in manifest.extra.items())
        line = (
            f"{_name(saved.path)}  {count_text(manifest.num_ranks, 'rank')} × "
            f"{count_text(manifest.num_replicas, 'replica')}  "
            f"{len(manifest.names):,} weights and buffers  {saved.num_bytes:,} bytes  {extra}"
        )
        print_text(line.rstrip())


@command("rota checkpoint verify run", group=checkpoint)
@_folder
@common.json
def verify(options: Options) -> None:
    """Compare every file with its hash, and check that every tensor is complete."""
    checkpoints = _read(options)
    from rota.runtime.checkpoints.saved import damage

    damages: dict[str, list[str]] = {}
    for saved in checkpoints.readable:
        with progress_line(f"reading {printable(saved.path.name)} ({size_text(saved.num_bytes)}) …"):
            problem = damage(saved)
        damages[saved.path.name] = [problem] if problem else []
        if not options.json:
            files_text = count_text(len(saved.manifest.files), "file")
            whole_text = f"complete: {files_text}, {count_text(saved.num_bytes, 'byte')}"
            print_text(f"{_name(saved.path)}  {printable(problem or whole_text)}")
    if options.json:
        print_json(checkpoints.to_fields() | {"damages": damages})
    damaged = [path.name for path, _ in checkpoints.unreadable] + [name for name, texts in damages.items() if texts]
    if damaged:
        raise PipelineError(f"damaged: {', '.join(damaged)}; a run goes on from the newest one that is whole")


@command("rota checkpoint export run/step-100 -o model.safetensors", group=checkpoint)
@_folder
@common.output(
    "FILE",
    "model.safetensors or, with --config, a folder for it and config.json",
    writes=lambda options: "file" if options.config is None else "folder",
    required=True,
)
@common.json
@common.file(
    "--config",
    metavar="CONFIG.json",
    help="the model's config.json; it is copied next to model.safetensors, so that from_pretrained loads both",
)
def export(options: Options) -> None:
    """Write the model of a checkpoint, or of the newest one in FOLDER, as one safetensors file."""
    require("torch", "torch")
    require("safetensors", "checkpoint")
    from rota.runtime.checkpoints import checkpoint_folder, saved

    readable, damaged = checkpoint_folder.find(Path(options.folder))
    if not readable:
        raise damaged[0][1]
    for _, error in damaged:
        note("checkpoint", f"left out: {printable(str(error))}")
    newest, path = readable[-1], Path(options.output)
    if options.config is not None:
        config = read_text(options.config)
        files.make_folder(options.output)
        path /= "model.safetensors"
    with progress_line(f"writing {printable(str(path))} ({size_text(newest.num_bytes)} to read) …"):
        num_tensors = saved.export(newest, path)
    if options.config is not None:
        files.write(str(path.with_name("config.json")), config, quietly=options.json)
    if options.json:
        print_json({"path": str(path), "num_tensors": num_tensors, **reports.of_checkpoint(newest)})
    else:
        print_text(printable(f"Wrote {num_tensors:,} weights and buffers from {newest.path} to {path}."))


class _Checkpoints(NamedTuple):
    """The checkpoints in a folder; `unreadable` ones with the error."""

    readable: Sequence[Saved]
    unreadable: Sequence[tuple[Path, RotaError]]

    def to_fields(self) -> dict[str, Any]:
        return {
            "checkpoints": [reports.of_checkpoint(saved) for saved in self.readable],
            "unreadable": [{"name": path.name, "error": str(error)} for path, error in self.unreadable],
        }


def _read(options: Options) -> _Checkpoints:
    """All checkpoints in the folder; prints a line for each that cannot be read, unless --json is given."""
    require("torch", "torch")
    from rota.runtime.checkpoints.checkpoint_folder import find

    checkpoints = _Checkpoints(*find(Path(options.folder)))
    if not options.json:
        for path, error in checkpoints.unreadable:
            print_text(f"{_name(path)}  unreadable: {printable(str(error))}")
    return checkpoints


def _name(path: Path) -> str:
    return f"{printable(path.name):<12}"
