"""Where a thread is, read from its stack by another thread."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

_NOT_THE_USERS = {"torch", "rota", "contextlib", *sys.stdlib_module_names}


class Doing(NamedTuple):
    """What a rank does, in words that follow its name; `waits`: whether it waits for another rank, or is busy."""

    waits: bool
    words: str


def frames_of(thread: int | None) -> list[FrameType]:
    """The thread's calls, innermost first; none if it has ended."""
    frames = []
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def is_in_a_collective(frames: list[FrameType]) -> bool:
    """Whether the thread is in native code that talks to other processes, rather than in a stage or on the disk."""
    inner = _module(frames[0]) if frames else ""
    is_torchs = inner.startswith("torch.distributed") and not inner.startswith("torch.distributed.checkpoint")
    return is_torchs or inner.startswith("rota.runtime")


def place(frames: list[FrameType]) -> str:
    """The innermost line that is neither PyTorch's, Python's nor ours, such as "train.py:12 in forward"."""
    for frame in frames:
        if _module(frame).partition(".")[0] not in _NOT_THE_USERS:
            code = frame.f_code
            return f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} in {code.co_name}"
    return ""


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
