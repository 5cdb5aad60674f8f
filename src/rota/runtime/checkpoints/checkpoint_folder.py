"""A folder of checkpoints: only whole checkpoints are named `step-N`.

    step-20.partial/  being written, by all ranks ──one rename──▶  step-20/  whole
    step-20.replaced/ the old step-20, while it is saved again   ──▶  removed, or put back after a crash

If something that Rota did not make has such a name, the next is used: step-20.1.partial, step-20.2.partial …
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

from rota.errors import FormatError, PipelineError
from rota.reading import LARGEST
from rota.runtime.checkpoints.files import MANIFEST, MARKER, Saved, read_saved
from rota.runtime.checkpoints.manifest import Manifest

_WHOLE = re.compile("step-([0-9]{1,18})")
_TEMPORARY = re.compile(r"(step-[0-9]{1,18})(?:\.[0-9]+)?\.(partial|replaced)")


def readable_ones(folder: Path) -> tuple[list[Saved], list[tuple[Path, FormatError]]]:
    """Whole checkpoints whose manifest can be read, in the order they were saved, and those whose manifest cannot."""
    found, damaged = [], []
    for path in whole_paths(folder):
        try:
            found.append(read_saved(path))
        except FormatError as error:
            damaged.append((path, error))
    return sorted(found, key=lambda saved: (saved.manifest.number, saved.manifest.step)), damaged


def whole_paths(folder: Path) -> list[Path]:
    """Paths of whole checkpoints, sorted by step, not read yet; a missing folder has none. Raises FormatError.

    A checkpoint of Rota's that has lost its manifest is included, so that it is reported.
    """
    found = [(int(match[1]), folder / name) for name in _names_in(folder) if (match := _WHOLE.fullmatch(name))]
    return [path for _, path in sorted(found) if _was_whole(path)]


def _was_whole(path: Path) -> bool:
    return is_checkpoint(path) or os.path.lexists(path / MARKER)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a folder with an entry `rota.json`, of any kind."""
    return os.path.lexists(path / MANIFEST)


def unfinished_ones(folder: Path) -> list[Path]:
    """Paths of saves that were interrupted or are still running, and of interrupted copies. Raises FormatError."""
    paths = [folder / name for name in sorted(_names_in(folder)) if name.startswith("step-")]
    return [path for path in paths if not (_WHOLE.fullmatch(path.name) and _was_whole(path))]


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FormatError(f"cannot read {folder}: {error.strerror}") from None
    except ValueError:  # a null character
        raise FormatError(f"cannot read {str(folder)!r}: not a valid path") from None


def recover_folder(folder: Path) -> None:
    """Make the folder, and put back or remove what interrupted saves left in it. Touches nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(_names_in(folder)):
        path, match = folder / name, _TEMPORARY.fullmatch(name)
        if match is None or not _is_ours(path):
            continue
        whole = folder / match[1]
        if match[2] == "replaced" and is_checkpoint(path) and not os.path.lexists(whole):
            path.rename(whole)  # interrupted between the two renames of `publish`
        else:
            _remove(path)


def _is_ours(path: Path) -> bool:
    """Whether Rota made it: a folder that has the marker or is still empty."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        return False
    return (path / MARKER).is_file() or not any(path.iterdir())


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into. Raises PipelineError if its final name is taken."""
    recover_folder(folder)
    path = folder / f"step-{step}"
    if os.path.lexists(path) and (path.is_symlink() or not (path / MANIFEST).is_file()):
        raise PipelineError(f"{path} exists and is not a checkpoint of Rota's; move it out of {folder}")
    (partial := _free(path, "partial")).mkdir()
    (partial / MARKER).touch()
    return partial


def _free(path: Path, suffix: str) -> Path:
    """An unused path beside `path`, with this suffix."""
    numbers = ("", *(f".{number}" for number in range(1, 1000)))
    names = (path.with_name(f"{path.name}{number}.{suffix}") for number in numbers)
    return next(name for name in names if not os.path.lexists(name))


def publish(partial: Path, manifest: Manifest, keep: int | None) -> None:
    """Make a fully written folder the newest whole checkpoint, then keep only the `keep` newest."""
    write_synced(partial / MANIFEST, manifest.to_json().encode())
    _sync(partial)
    path = partial.with_name(f"step-{manifest.step}")
    replaced = _free(path, "replaced") if path.exists() else None
    if replaced is not None:
        (path / MARKER).touch()  # a copy without hidden files has lost it
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    if replaced is not None:
        _remove(replaced)
    if keep is not None:
        for saved in readable_ones(path.parent)[0][:-keep]:
            _retire(saved.path)


def next_number(folder: Path) -> int:
    """The number of the next save. Raises PipelineError if there is no higher one that can be read again."""
    newest = max(readable_ones(folder)[0], key=lambda saved: saved.manifest.number, default=None)
    if newest is not None and newest.manifest.number >= LARGEST:
        raise PipelineError(
            f"{newest.path} says that it is save number {newest.manifest.number}, the last that there can be; move it "
            f"out of {folder}"
        )
    return 1 if newest is None else newest.manifest.number + 1


def write_synced(path: Path, data: bytes) -> None:
    """Write a file so that it is still there after a power cut."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _retire(path: Path) -> None:
    """Rename a whole checkpoint, then remove it: half of one must not be named `step-N`. A link is left alone."""
    if not path.is_symlink():
        (path / MARKER).touch()
        _remove(path.rename(_free(path, "partial")))


def _remove(path: Path) -> None:
    """Remove a folder, its marker last, so that the rest of an interrupted removal is still known as Rota's."""
    for inner in path.iterdir():
        if inner.name != MARKER:
            shutil.rmtree(inner) if inner.is_dir() and not inner.is_symlink() else inner.unlink()
    shutil.rmtree(path)


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
