"""The files of one checkpoint, which are not trusted: a file that does not match the manifest is refused.

rota.json           the manifest
rank-N.safetensors  tensors, as rank N wrote them
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from rota import reading
from rota.errors import FormatError
from rota.runtime.checkpoints.manifest import MANIFEST, Manifest, file_of

_PIECE_BYTES = 2**22


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """Open a regular file to read it. Raises FormatError for anything else, also for a link to one."""
    try:
        with reading.open_file(path, follow=False) as file:
            yield file
    except FileNotFoundError:
        raise FormatError(f"{path} is missing") from None
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror}") from None


def pieces(file: FileIO, num_bytes: int) -> Iterator[memoryview]:
    """The next `num_bytes` of a file, or fewer at its end, in pieces; each piece overwrites the one before."""
    buffer = memoryview(bytearray(min(num_bytes, _PIECE_BYTES)))
    while num_bytes and (count := file.readinto(buffer[: min(num_bytes, _PIECE_BYTES)])):
        yield buffer[:count]
        num_bytes -= count


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk whose manifest has been read."""

    path: Path
    manifest: Manifest

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(file.num_bytes for file in self.manifest.files)

    def wrong_files(self) -> Iterator[str]:
        """What is wrong with the files, one by one, without reading them: missing, of a wrong size, or not listed."""
        try:
            found = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(self.path)}
        except OSError as error:
            raise FormatError(f"cannot read {self.path}: {error.strerror}") from None
        found.pop(MANIFEST, None)
        for rank, file in enumerate(self.manifest.files):
            name = file_of(rank)
            if (entry := found.pop(name, None)) is None:
                yield f"{name} is missing"
            elif not stat.S_ISREG(entry.st_mode):
                yield f"{name} is not a regular file"
            elif entry.st_size != file.num_bytes:
                yield f"{name} has {entry.st_size:,} bytes instead of {file.num_bytes:,}"
        for name in sorted(found):
            yield f"{reading.printable(name)} is not listed in {MANIFEST}"


def read_saved(path: Path) -> Saved:
    """The checkpoint in `path`, from its manifest alone. Raises FormatError."""
    manifest = path / MANIFEST
    with suppress(OSError):  # `read_text` says what is wrong
        reading.require_regular(manifest, follow=False)
    text = reading.read_text(manifest)
    with naming(manifest):
        return Saved(path, Manifest.from_json(text))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the file's path in front of FormatErrors that are raised inside."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
