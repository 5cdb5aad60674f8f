"""What glibc's malloc does with memory that a step has freed, and in what pages large tensors lie.

By default it may return it to the system and fetch it again in the next step, page by page; how often depends on where
the first buffers happen to lie, which differs from one start of a script to the next. Buffers that it always returns
come back in few, huge pages.
"""

from __future__ import annotations

import ctypes
import os
import sys

# glibc, malloc.h, and the variables with which a user sets the same
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
#: PyTorch asks for huge pages for tensors of 2 MiB or more, if this variable is set when it allocates its first one. It
#: has no effect where the system refuses them: /sys/kernel/mm/transparent_hugepage/enabled.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
_NEVER = 2**31 - 1  # bytes, the largest value of the call's type
_LARGEST_MMAP_THRESHOLD = 32 << 20  # that glibc accepts
_TOGETHER = 16 << 20  # bytes that are fetched at once


def keep_freed_memory() -> None:
    """Let this process keep what it frees for its next buffers; nothing happens if it does not use glibc's malloc.

    Buffers of more than 32 MiB still have pages of their own. Settings in the environment are left as they are.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _BY_USER):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return
    set_option(_ARENA_MAX, 1)  # an empty arena of another thread is returned whatever the thresholds
    set_option(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    set_option(_TRIM_THRESHOLD, _NEVER)
    set_option(_TOP_PAD, _TOGETHER)
