"""The files of one checkpoint, which are not trusted: a file that does not match the manifest is refused.

rota.json      the manifest: step, names of weights, all other files with their sizes and hashes
plan.json      the plan that was running
training.json  options and states of optimizer and scheduler, random state
tensors.json   where each tensor is
tensors-N.bin  the bytes of tensors, as rank N wrote them
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from rota import reading
from rota.errors import FormatError
from rota.runtime.checkpoints.manifest import File, Manifest

MANIFEST, PLAN, TRAINING, TENSORS = "rota.json", "plan.json", "training.json", "tensors.json"
MARKER = ".rota"  # an empty file in every folder that Rota made, and so may remove
PIECE_BYTES = 2**22


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
    buffer = memoryview(bytearray(min(num_bytes, PIECE_BYTES)))
    while num_bytes and (count := file.readinto(buffer[: min(num_bytes, PIECE_BYTES)])):
        yield buffer[:count]
        num_bytes -= count


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk whose manifest has been read."""

    path: Path
    manifest: Manifest

    @property
    def num_bytes(self) -> int:
        """Bytes of all files that the manifest lists."""
        return sum(file.num_bytes for file in self.manifest.files.values())

    def require_files(self) -> None:
        """Raises FormatError if a file is missing, has a wrong size or is not listed. Contents are not read."""
        for damage in self.wrong_files():
            raise FormatError(f"{self.path}: {damage}")

    def wrong_files(self) -> Iterator[str]:
        """What is wrong with the files, one by one, without reading their contents."""
        for name, file in self.manifest.files.items():
            try:
                found = (self.path / name).lstat()
            except (OSError, ValueError):
                yield f"{reading.printable(name)} is missing"
                continue
            if not stat.S_ISREG(found.st_mode):
                yield f"{reading.printable(name)} is not a regular file"
            elif found.st_size != file.num_bytes:
                yield f"{reading.printable(name)} has {found.st_size:,} bytes instead of {file.num_bytes:,}"
        try:
            found_names = sorted(os.listdir(self.path))
        except OSError as error:
            raise FormatError(f"cannot read {self.path}: {error.strerror}") from None
        for name in found_names:
            if name not in self.manifest.files and name not in (MANIFEST, MARKER):
                yield f"{reading.printable(name)} is not listed in {MANIFEST}"

    def changed_files(self) -> Iterator[str]:
        """What is wrong with the files, including contents that do not match their hashes."""
        if found := [*self.wrong_files()]:
            yield from found
            return
        for name, file in self.manifest.files.items():
            if self._digest(name) != file.sha256:
                yield f"{reading.printable(name)} has changed since it was saved"

    def _digest(self, name: str) -> str:
        digest = hashlib.sha256()
        with opened(self.path / name) as file:
            for piece in pieces(file, self.manifest.files[name].num_bytes):
                digest.update(piece)
        return digest.hexdigest()

    def read_text(self, name: str) -> str:
        """The text of a small file. Raises FormatError if it does not match its hash."""
        path = self.path / name
        if name not in self.manifest.files:
            raise FormatError(f"{self.path / MANIFEST} lists no {name}")
        if self.manifest.files[name].num_bytes > reading.LARGEST_BYTES:
            raise FormatError(f"{path} has more than {reading.LARGEST_BYTES:,} bytes")
        with opened(path) as file:
            data = b"".join(map(bytes, pieces(file, self.manifest.files[name].num_bytes)))
        if File.of(data) != self.manifest.files[name]:
            raise FormatError(f"{path} has changed since it was saved")
        return _decoded(path, data)


def read_saved(path: Path) -> Saved:
    """The checkpoint in `path`, from its manifest alone. Raises FormatError."""
    with opened(path / MANIFEST) as file:
        data = b"".join(map(bytes, pieces(file, reading.LARGEST_BYTES + 1)))
    if len(data) > reading.LARGEST_BYTES:
        raise FormatError(f"{path / MANIFEST} has more than {reading.LARGEST_BYTES:,} bytes")
    text = _decoded(path / MANIFEST, data)
    with naming(path / MANIFEST):
        return Saved(path, Manifest.from_json(text))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the file's path in front of FormatErrors that are raised inside."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def _decoded(path: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not a text file in UTF-8 (byte {error.start})") from None
