"""One job at a time uses a folder of checkpoints: its first rank holds a lock, which ends with the process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rota.core.errors import PipelineError
from rota.core.reading import printable

LOCK = ".rota.lock"
_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_LOOK_S = 0.05  # between two tries
_SILENT_S = 2.0  # of waiting, before it is said
_MOST_BYTES = 1000  # of the text that describes the holder


@dataclass(slots=True)
class _Held:
    descriptor: int
    num_users: int = 0


_held: dict[str, _Held] = {}  # this process's locks, by the folder's real path


@contextmanager
def locked(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Keeps other jobs out; all users in one process share the lock.

    Says so when it waits for another job; raises PipelineError if that holds the lock for longer than `patience_s`.
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
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise PipelineError(f"cannot lock {folder} with {path}: {error.strerror}; move that file away") from None
    with ExitStack() as failing:
        failing.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PipelineError(f"cannot lock {folder}: {path} is not a regular file; move it away")
        try:
            _wait(folder, descriptor, patience_s)
        except BlockingIOError:
            raise PipelineError(
                f"{folder} is in use by another job{_holder(descriptor)}; end that job, or save into another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise PipelineError(f"cannot lock {path}: {error.strerror}; save into another folder") from None
            _say(f"{folder} is on a file system without locks ({error.strerror}); let only one job use it at a time")
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().isoformat(" ", "seconds")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(mine).encode(), 0)
        failing.pop_all()
    return descriptor


def _wait(folder: Path, descriptor: int, patience_s: float) -> None:
    """Take the lock. Raises OSError, and BlockingIOError if somebody else holds it for longer than `patience_s`."""
    begun_s, is_said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited_s = time.monotonic() - begun_s
            if waited_s > patience_s:
                raise
        else:
            return
        if waited_s > _SILENT_S and not is_said:
            _say(f"{folder} is in use by another job{_holder(descriptor)}; waiting up to {patience_s:.0f} s for it")
            is_said = True
        time.sleep(_LOOK_S)


def _holder(descriptor: int) -> str:
    """Who holds the lock, for an error message; the file is not trusted."""
    try:
        holder = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
        pid, host, since = (printable(str(holder[name]))[:100] for name in ("pid", "host", "since"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f" (process {pid} on {host}, since {since})"


def _say(text: str) -> None:
    print(f"rota: {text}", file=sys.stderr, flush=True)


def _leave_to_the_parent() -> None:
    """Close the locks in a forked child, such as a data loader's worker, which may outlive the job."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)
