"""Atomic file writes: to a temporary file in the same folder, which is then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary file to write; it replaces `path` when the block ends without an error.

    Any interruption leaves `path` unchanged. A symbolic link is followed. A path that is not a regular file
    (/dev/stdout) is given as it is.

    Args:
        path: The file to create or replace.

    Yields:
        A new, empty file in the same folder, with the same suffix.

    Raises:
        OSError: The file cannot be written.
    """
    target = Path(os.path.realpath(path))
    if os.path.exists(path) and not os.path.isfile(path):  # not `target`: for a pipe that is not a path
        yield Path(path)
        return
    partial = target.with_name(f".{target.stem[:100]}-{secrets.token_hex(4)}.partial{target.suffix}")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # the umask applies
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    try:
        yield partial
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically, in UTF-8. Raises OSError."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
