"""What drawing a large tensor does to the random generator: a rank that is started again need not draw it again.

first start     state a ──draw 16 M numbers──▶ state b     noted: (state a, the operation) → state b
after a kill    state a ──────looked up──────▶ state b

What is noted is true of any process of the run: the same operation takes the same state to the same state. So a script
that does something else after a restart finds nothing, and draws. The tensor's values can still be drawn from state a.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch

from rota.runtime import kept_memory
from rota.runtime.deferred.log import Generator
from rota.runtime.launcher_files import draws_file

_MOST = 4096  # draws that are noted, each 5 kB
_KEY_BYTES = 16
_LENGTH = struct.Struct("<I")


@final
class KnownDraws:
    """The draws that `file` has, and new ones; the file is of this run, and outlives its processes."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._after = _read(file)
        self._has_new = False

    def draw(self, generator: Generator, what: tuple[Any, ...], act: Callable[[], object]) -> bool:
        """Advance the generator as `act` does; returns whether that was called.

        `what`: all that this depends on beside the generator's state, with a `repr` that is the same in all processes.
        """
        state = generator.get_state().numpy().tobytes()
        key = hashlib.blake2b(state + repr(what).encode(), digest_size=_KEY_BYTES).digest()
        if (after := self._after.get(key)) is not None:
            generator.set_state(torch.frombuffer(bytearray(after), dtype=torch.uint8))
            return False
        act()
        if len(self._after) < _MOST:
            self._after[key] = generator.get_state().numpy().tobytes()
            self._has_new = True
        return True

    def save(self) -> None:
        """Write new draws for the processes after this one. Nothing is lost where that cannot be done: they draw."""
        if not self._has_new:
            return
        self._has_new = False
        partial = self._file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            partial.write_bytes(b"".join(key + _LENGTH.pack(len(s)) + s for key, s in self._after.items()))
            partial.replace(self._file)


def _read(file: Path) -> dict[bytes, bytes]:
    data = file.read_bytes() if file.exists() else b""
    found, at = {}, 0
    while at < len(data):
        key, at = data[at : at + _KEY_BYTES], at + _KEY_BYTES
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        found[key], at = data[at : at + length], at + length
    return found


def of_this_run() -> KnownDraws | None:
    """The draws of this run, if its processes may be started again."""
    file = draws_file()
    return KnownDraws(file) if file is not None and kept_memory.is_given() else None
