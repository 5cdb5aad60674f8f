"""Real text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


class Corpus:
    """Random windows of bytes out of the standard library; the same for the same seed."""

    def __init__(self, length: int, most_bytes: int = 4_000_000, seed: int = 0) -> None:
        self.length = length
        data = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            data += path.read_bytes()
            if len(data) >= most_bytes:
                break
        self.bytes = torch.frombuffer(data, dtype=torch.uint8)
        self._random = torch.Generator().manual_seed(seed)

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and the bytes that follow them, each (rows, length)."""
        starts = torch.randint(len(self.bytes) - self.length - 1, (rows, 1), generator=self._random)
        windows = self.bytes[starts + torch.arange(self.length + 1)].long()
        return windows[:, :-1], windows[:, 1:]
