"""This process's own memory in huge pages, so that forking it, and ending what was forked, is quick.

A fork copies one entry per page of memory that is not a file's: of 200 MB 50,000 entries, or 100 for huge pages.
"""

from __future__ import annotations

import sys

from rota.runtime.mapped_file import HUGE_BYTES, collapse


def lay_in_huge_pages() -> None:
    """Lay what this process has allocated so far in huge pages, as far as the system does that (Linux 6.1).

    Values and addresses stay as they are. A forked process that writes gets copies of 4 KiB, as it does of small pages.
    """
    if sys.platform != "linux":
        return
    with open("/proc/self/maps", "rb") as maps:
        lines = maps.readlines()  # files' names may have any bytes but that of a new line
    for line in lines:
        addresses, access, _, _, inode, *name = line.split()
        if access == b"rw-p" and inode == b"0" and name != [b"[stack]"]:
            first, last = (int(address, 16) for address in addresses.split(b"-"))
            start, end = -(-first // HUGE_BYTES) * HUGE_BYTES, last // HUGE_BYTES * HUGE_BYTES
            if start < end:
                collapse(start, end - start)
