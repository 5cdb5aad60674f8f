"""A folder of checkpoints: only whole checkpoints are named `step-N`.

step-20.partial/  being written, by all ranks ──one rename──▶  step-20/  whole
step-20.replaced/ the old step-20, while it is saved again   ──▶  removed, or put back after a crash

One job at a time uses it: its first rank holds a lock, which ends with the process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rota.core.errors import FormatError, PipelineError
from rota.core.reading import printable
from rota.runtime.checkpoints.saved import MANIFEST, Manifest, Saved, file_of, read_contents, read_saved
from rota.runtime.environment import say

LOCK = ".rota.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_LOOK_S = 0.05  # between two tries
_WHOLE = re.compile("step-([0-9]{1,18})")
_TEMPORARY = re.compile(r"step-[0-9]{1,18}\.(partial|replaced)")
_INSIDE = re.compile(r"rota\.json|rank-[0-9]+\.safetensors|\..+")  # file systems make hidden files


def readable_ones(folder: Path) -> tuple[list[Saved], list[tuple[Path, FormatError]]]:
    """Whole checkpoints whose manifest can be read, in the order they were saved, and those whose manifest cannot.

    A checkpoint of Rota's that has lost its manifest is among the latter. A missing folder has none. Raises FormatError
    if the folder cannot be read.
    """
    whole, damaged = [], []
    numbered = [(int(match[1]), folder / name) for name in _names_in(folder) if (match := _WHOLE.fullmatch(name))]
    for _, path in sorted(numbered):
        if is_checkpoint(path) or os.path.lexists(path / file_of(0)):
            try:
                whole.append(read_saved(path))
            except FormatError as error:
                damaged.append((path, error))
    return sorted(whole, key=lambda saved: (saved.manifest.number, saved.manifest.step)), damaged


def find(path: Path) -> tuple[list[Saved], list[tuple[Path, FormatError]]]:
    """The checkpoint `path`, or all in the folder `path` in the order they were saved; and those that cannot be read.

    Raises FormatError if there are none.
    """
    if not is_checkpoint(path):
        whole, damaged = readable_ones(path)
        if not (whole or damaged):
            raise FormatError(f"no whole checkpoint in {path}; give a folder that has a step-N, or a step-N itself")
        return whole, damaged
    try:
        return [read_saved(path)], []
    except FormatError as error:
        return [], [(path, error)]


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a folder with an entry `rota.json`, of any kind."""
    return os.path.lexists(path / MANIFEST)


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FormatError(f"cannot read {folder}: {error.strerror}") from None
    except ValueError:  # a null character
        raise FormatError(f"cannot read {str(folder)!r}: not a valid path") from None


# --- saving -----------------------------------------------------------------------------------------------------------


def recover_folder(folder: Path) -> None:
    """Make the folder, and put back or remove what interrupted saves left in it.

    It touches nothing else: a folder in which there is anything that Rota does not write is left alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder / name for name in _names_in(folder) if _TEMPORARY.fullmatch(name)):
        if stat.S_ISDIR(path.lstat().st_mode) and all(map(_INSIDE.fullmatch, os.listdir(path))):
            whole = path.with_suffix("")
            if path.suffix == ".replaced" and is_checkpoint(path) and not os.path.lexists(whole):
                path.rename(whole)  # interrupted between the two renames of `publish`
            else:
                shutil.rmtree(path)


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into. Raises PipelineError if one of its names is taken."""
    recover_folder(folder)
    path = folder / f"step-{step}"
    partial, replaced = path.with_suffix(".partial"), path.with_suffix(".replaced")
    is_replaced = not path.is_symlink() and (path / MANIFEST).is_file()
    for other in (partial, replaced) if is_replaced else (path, partial, replaced):
        if os.path.lexists(other):
            raise PipelineError(f"{other} exists and is not a checkpoint of Rota's; move it out of {folder}")
    partial.mkdir()
    return partial


def publish(partial: Path, manifest: Callable[[int], Manifest], keep: int | None) -> None:
    """Make a folder that all ranks have written the newest whole checkpoint, then keep only the `keep` newest.

    `manifest`: that of a save with this number. Raises PipelineError, and leaves what was there, if `load` would refuse
    the checkpoint.
    """
    path, replaced = partial.with_suffix(""), partial.with_suffix(".replaced")
    before, _ = readable_ones(path.parent)
    number = 1 + max((saved.manifest.number for saved in before), default=0)
    with (partial / MANIFEST).open("w") as file:
        file.write(manifest(number).to_json())
        file.flush()
        os.fsync(file.fileno())
    try:
        read_contents(read_saved(partial))
    except FormatError as error:
        raise PipelineError(
            f"{path} is not saved, because it could not be read again, from a folder that all ranks must share: {error}"
        ) from None
    _sync(partial)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
    older = [saved.path for saved in before if saved.path != path]
    for other in older[: max(len(older) + 1 - keep, 0)] if keep is not None else ():
        retired = other.with_suffix(".partial")
        if not other.is_symlink() and not os.path.lexists(retired):
            shutil.rmtree(other.rename(retired))  # in this order: half of a checkpoint must not be named `step-N`


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the lock ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Held:
    descriptor: int
    num_users: int = 0


_held: dict[str, _Held] = {}  # this process's locks, by the folder's real path


@contextmanager
def locked(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Keeps other jobs out; all users in one process share the lock.

    Raises PipelineError if another job holds the lock for longer than `patience_s`.
    """
    key = os.path.realpath(folder)
    held = _held.setdefault(key, _held.get(key) or _Held(_lock(folder, patience_s)))
    held.num_users += 1
    try:
        yield
    finally:
        held.num_users -= 1
        if held.num_users == 0 and _held.get(key) is held:  # a forked child holds no lock
            del _held[key]
            os.close(held.descriptor)


def _lock(folder: Path, patience_s: float) -> int:
    """A descriptor that holds the lock; warns if the file system has no locks."""
    path = folder / LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise PipelineError(f"cannot lock {folder} with {path}: {error.strerror}; move that file away") from None
    with ExitStack() as failing:
        failing.callback(os.close, lock)
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise PipelineError(f"cannot lock {folder}: {path} is not a regular file; move it away")
        try:
            _take(folder, lock, patience_s)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise PipelineError(f"cannot lock {path}: {error.strerror}; save into another folder") from None
            say(f"{folder} is on a file system without locks ({error.strerror}); let only one job use it at a time")
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
        os.ftruncate(lock, 0)
        os.pwrite(lock, holder.encode(), 0)
        failing.pop_all()
    return lock


def _take(folder: Path, lock: int, patience_s: float) -> None:
    """Raises PipelineError if somebody else holds the lock for longer than `patience_s`, OSError if there are none."""
    until_s, is_waiting = time.monotonic() + patience_s, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = printable(os.pread(lock, 200, 0).decode(errors="replace"))
        in_use = f"{folder} is in use by another job ({holder})"
        if time.monotonic() >= until_s:
            raise PipelineError(f"{in_use}; end that job, or save into another folder")
        if not is_waiting:
            say(f"{in_use}; waiting up to {patience_s:.0f} s for it")
        is_waiting = True
        time.sleep(_LOOK_S)


def _leave_to_the_parent() -> None:
    """Close the locks in a forked child, such as a data loader's worker, which may outlive the job."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)
