"""The folder of a run: only this user can enter it, and it is removed however the run ends."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import final

# Waits until the launcher is gone; then ends the process groups that the last line names, and removes the folder.
_JANITOR = 'while read -r line; do groups=$line; done; [ -z "$groups" ] || kill -s KILL -- $groups; rm -rf -- "$0"'


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
def run_folder(prefix: str) -> Iterator[Folder]:
    """A folder with mode 0700 in the system's temporary folder. A janitor removes it if this process is killed."""
    path = tempfile.mkdtemp(prefix=prefix)  # not a TemporaryDirectory, which a forked rank would remove at its end
    janitor = subprocess.Popen(
        ["/bin/sh", "-c", _JANITOR, path],
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
