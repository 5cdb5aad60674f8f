"""A file of memory, mapped in huge pages: the kernel then maps 200 MB in 100 pages instead of 50,000.

By default, Linux gives shared memory no huge pages by itself (`shmem_enabled` is `never`). A process can ask for them
(MADV_COLLAPSE, since Linux 6.1), if file and mapping have the same alignment. The pages stay huge: a process that maps
the file later has them at once, and one that ends has few to unmap.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from typing import final

HUGE_BYTES = 2 << 20  #: of a page, and the alignment of what shall lie in such pages
_REMOVE, _POPULATE_WRITE, _COLLAPSE = 9, 23, 25  # linux/mman.h, for madvise
_FIXED, _NO_RESERVE = 0x10, 0x4000  # linux/mman.h, for mmap
_FAILED = ctypes.c_void_p(-1).value


@final
class MappedFile:
    """The first `num_bytes` of a file of memory, mapped until nothing refers to `view` any more. Only on Linux.

    Raises OSError if it cannot be mapped.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        self._file = file
        self._address = _mapped(file, num_bytes)
        memory = _class_of(num_bytes).from_address(self._address)
        weakref.finalize(memory, _libc().munmap, self._address, num_bytes).atexit = False
        #: The bytes, which may be written.
        self.view = memoryview(memory).cast("B")

    def fill(self, start: int, num_bytes: int) -> None:
        """Give a part that has no memory yet all of its memory. Raises OSError if there is not enough.

        A page that is missing later would end the process.
        """
        if start % HUGE_BYTES == 0 and num_bytes >= HUGE_BYTES:
            for at in range(start, start + num_bytes, HUGE_BYTES):
                os.pwrite(self._file, b"\0", at)  # a range without any page would not be made huge
            collapse(self._address + start, num_bytes)
        os.posix_fallocate(self._file, start, num_bytes)

    def map_now(self, start: int, num_bytes: int) -> None:
        """Map all pages of a part at once, which is ten times as fast as one by one when it is written."""
        if start % HUGE_BYTES == 0 and num_bytes >= HUGE_BYTES:
            collapse(self._address + start, num_bytes)
        _libc().madvise(self._address + start, num_bytes, _POPULATE_WRITE)

    def free(self, start: int, num_bytes: int) -> None:
        """Give the memory of a part back; nothing may read it any more."""
        _libc().madvise(self._address + start, num_bytes, _REMOVE)


def collapse(address: int, num_bytes: int) -> None:
    """Lay whole huge pages of mapped memory in such pages. An older system refuses, and then works page by page."""
    _libc().madvise(address, num_bytes, _COLLAPSE)


def _mapped(file: int, num_bytes: int) -> int:
    """Map a file at an address that is a multiple of a huge page; returns the address."""
    libc, shared = _libc(), mmap.MAP_SHARED | _FIXED
    reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    free = _checked(libc.mmap(None, num_bytes + HUGE_BYTES, 0, reserve, -1, 0))
    address = -(-free // HUGE_BYTES) * HUGE_BYTES
    end = address + -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    _checked(libc.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, shared, file, 0))
    for start, num_left in ((free, address - free), (end, free + num_bytes + HUGE_BYTES - end)):
        if num_left:
            libc.munmap(start, num_left)
    return address


def _checked(address: int) -> int:
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


@cache
def _class_of(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """A class whose objects a `weakref` can refer to, as those of ctypes cannot."""
    return type("Memory", (ctypes.c_char * num_bytes,), {})
