"""Files that are there whole or not at all: written beside their place, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A new file beside `path`, with the same suffix, to write into; it becomes `path` when the block ends well.

    What is cut off leaves `path` as it was. A link is followed; what is no plain file (/dev/stdout) is written to as it
    is. Raises OSError.
    """
    target = Path(os.path.realpath(path))
    if os.path.exists(path) and not os.path.isfile(path):  # not `target`: of a pipe, that is no path
        yield Path(path)
        return
    partial = target.with_name(f".{target.stem[:100]}-{secrets.token_hex(4)}.partial{target.suffix}")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # the umask has its say
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    try:
        yield partial
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """A whole file in UTF-8. Raises OSError."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
