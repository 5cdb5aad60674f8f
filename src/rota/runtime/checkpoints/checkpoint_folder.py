"""A folder of checkpoints: whole ones are named `step-N`, and nothing else ever is.

    step-20.partial/  being written, by all ranks ──one rename──▶  step-20/  whole
    step-20.replaced/ what step-20 was, while it is saved again  ──▶  removed, or put back after a crash

Where such a name is taken by something that Rota did not make, the next is used: step-20.1.partial, step-20.2.partial …
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

from rota.errors import FormatError, PipelineError
from rota.runtime.checkpoints.files import MANIFEST, MARKER, Saved, read_saved
from rota.runtime.checkpoints.manifest import Manifest

_WHOLE = re.compile("step-([0-9]{1,18})")
_TEMPORARY = re.compile(r"(step-[0-9]{1,18})(?:\.[0-9]+)?\.(partial|replaced)")


def readable_ones(folder: Path) -> tuple[list[Saved], list[tuple[Path, FormatError]]]:
    """The whole checkpoints whose manifest can be read, as they were saved one after another; and those that cannot."""
    found, damaged = [], []
    for path in whole_paths(folder):
        try:
            found.append(read_saved(path))
        except FormatError as error:
            damaged.append((path, error))
    return sorted(found, key=lambda saved: (saved.manifest.number, saved.manifest.step)), damaged


def whole_paths(folder: Path) -> list[Path]:
    """Where whole checkpoints are, by step, and unread; a folder that is not there has none. Raises FormatError.

    One that Rota made and that has lost its manifest is among them, to be told.
    """
    found = [(int(match[1]), folder / name) for name in _names_in(folder) if (match := _WHOLE.fullmatch(name))]
    return [path for _, path in sorted(found) if _was_whole(path)]


def _was_whole(path: Path) -> bool:
    return is_checkpoint(path) or os.path.lexists(path / MARKER)


def is_checkpoint(path: Path) -> bool:
    """Whether it is a folder with a `rota.json`, of whatever kind."""
    return os.path.lexists(path / MANIFEST)


def unfinished_ones(folder: Path) -> list[Path]:
    """What is not whole: a save that was cut off or is still going on, a copy that was cut off. Raises FormatError."""
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
        raise FormatError(f"cannot read {str(folder)!r}: that is no path") from None


def recover_folder(folder: Path) -> None:
    """Make the folder, and put right or remove what saves that were cut off have left in it. Touches nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(_names_in(folder)):
        path, match = folder / name, _TEMPORARY.fullmatch(name)
        if match is None or not _is_ours(path):
            continue
        whole = folder / match[1]
        if match[2] == "replaced" and is_checkpoint(path) and not os.path.lexists(whole):
            path.rename(whole)  # cut off between the two renames of `publish`
        else:
            _remove(path)


def _is_ours(path: Path) -> bool:
    """Whether Rota made it: a folder that has the marker, or nothing yet."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        return False
    return (path / MARKER).is_file() or not any(path.iterdir())


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into. Raises PipelineError where it could not get its name."""
    recover_folder(folder)
    path = folder / f"step-{step}"
    if os.path.lexists(path) and (path.is_symlink() or not (path / MANIFEST).is_file()):
        raise PipelineError(f"{path} is there already and is no checkpoint of Rota's; move it out of {folder}")
    (partial := _free(path, "partial")).mkdir()
    (partial / MARKER).touch()
    return partial


def _free(path: Path, suffix: str) -> Path:
    """A name beside `path` that is not taken."""
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
        (path / MARKER).touch()  # lost where it was copied without hidden files
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    if replaced is not None:
        _remove(replaced)
    if keep is not None:
        for saved in readable_ones(path.parent)[0][:-keep]:
            _retire(saved.path)


def next_number(folder: Path) -> int:
    """The number of the next save."""
    return max((saved.manifest.number for saved in readable_ones(folder)[0]), default=0) + 1


def write_synced(path: Path, data: bytes) -> None:
    """Write a file so that it is still there after a power cut."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _retire(path: Path) -> None:
    """Remove a whole one, first by name: half a checkpoint must not have a whole one's. A link is left alone."""
    if not path.is_symlink():
        (path / MARKER).touch()
        _remove(path.rename(_free(path, "partial")))


def _remove(path: Path) -> None:
    """The marker last: what is left of a removal that is cut off must still be known as ours."""
    for inner in path.iterdir():
        if inner.name != MARKER:
            shutil.rmtree(inner) if inner.is_dir() and not inner.is_symlink() else inner.unlink()
    shutil.rmtree(path)


def _sync(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
