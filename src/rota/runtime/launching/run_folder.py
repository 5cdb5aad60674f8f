"""The folder of a run: only this user can enter it, and it is removed however the run ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import final

from rota.core.errors import PipelineError

# Waits until the launcher is gone; then ends the process groups that the last line names, and removes the folder.
_JANITOR = 'while read -r line; do groups=$line; done; [ -z "$groups" ] || kill -s KILL -- $groups; rm -rf -- "$@"'


@final
class Folder:
    """`path` is the folder. `guard` names the process groups that must not outlive this process."""

    def __init__(self, path: str, janitor: subprocess.Popen[bytes]) -> None:
        self.path = path
        self._janitor = janitor

    def guard(self, groups: Sequence[int]) -> None:
        """Set the process groups to end if this process is killed, instead of those set before."""
        assert self._janitor.stdin is not None
        with suppress(BrokenPipeError):  # the janitor was killed
            self._janitor.stdin.write((" ".join(f"-{group}" for group in groups) + "\n").encode())
            self._janitor.stdin.flush()


@contextmanager
def run_folder(prefix: str, where: str | None = None) -> Iterator[Folder]:
    """A folder with mode 0700 in `where`; None: in the system's temporary folder.

    If this process is killed, a janitor removes it; what a run left of which not even that is left, the next one does.

    Raises PipelineError if it cannot be made.
    """
    where = where or tempfile.gettempdir()
    try:
        _sweep(prefix, where)
        path, lock = _made(prefix, where)
    except OSError as error:
        raise PipelineError(
            f"the folder of the run cannot be made in {where}: {error.strerror}; choose another place with "
            f"--snapshot-folder, or with TMPDIR if there is no --max-restarts"
        ) from None
    janitor = subprocess.Popen(
        ["/bin/sh", "-c", _JANITOR, "janitor", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # Ctrl-C ends this process, but must not end the janitor
    )
    try:
        yield Folder(path, janitor)
    finally:
        janitor.kill()
        janitor.wait()
        assert janitor.stdin is not None
        with suppress(BrokenPipeError):
            janitor.stdin.close()
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _sweep(prefix: str, where: str) -> None:
    """Remove the folders of runs that are gone."""
    for entry in os.scandir(where):
        if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
            with suppress(OSError):  # it is in use, or another user's
                lock = _locked(entry.path, fcntl.LOCK_NB)
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)


def _made(prefix: str, where: str) -> tuple[str, int]:
    """A new folder that this process holds a lock of."""
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=where)  # no TemporaryDirectory: a forked rank would remove that
        with suppress(FileNotFoundError):
            lock = _locked(path)
            if os.path.exists(path):  # else another run has removed it before it was locked
                return path, lock
            os.close(lock)


def _locked(path: str, how: int = 0) -> int:
    """A descriptor that holds a folder's lock. Raises BlockingIOError with LOCK_NB if another process has it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | how)
    except BaseException:
        os.close(folder)
        raise
    return folder
