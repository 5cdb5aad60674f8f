"""Copies that a thread makes while the processor's cores have nothing else to do, such as in a pipeline's bubbles.

The system runs the thread only on a core that would be idle (SCHED_IDLE), so it takes no time from ranks that compute.
What is left when the copies are needed, the caller makes itself.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    import torch

_PIECE_BYTES = 4 << 20  # copied past the caches, and at most what `finish` waits for


@final
class SpareTimeCopies:
    """Copies between plain tensors of this process (`large_copies.is_plain`). Only on Linux."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, int, int]] = deque()  # target, source, bytes
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._copying = threading.Lock()  # held by the thread while it copies a piece
        self._thread: threading.Thread | None = None

    def start(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin to copy each (target, source). The sources may not be written before `finish`, which must follow."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rota-spare-time-copies", daemon=True)
            self._thread.start()
        self._held = [*copies]
        for target, source in self._held:
            to, of, num_bytes = target.data_ptr(), source.data_ptr(), source.nbytes
            self._pieces.extend(
                (to + at, of + at, min(_PIECE_BYTES, num_bytes - at)) for at in range(0, num_bytes, _PIECE_BYTES)
            )
        self._wake.put(True)

    def finish(self) -> None:
        """Copy what is left, and wait for what the thread is copying."""
        while self._copy_one():
            pass
        with self._copying:
            self._held = []

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self.finish()
            self._wake.put(False)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        with suppress(OSError):  # then it has the same priority as other threads
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        while self._wake.get():
            while True:
                with self._copying:
                    if not self._copy_one():
                        break

    def _copy_one(self) -> bool:
        """Copy a piece; False if none is left."""
        try:
            piece = self._pieces.popleft()
        except IndexError:
            return False
        ctypes.memmove(*piece)
        return True
