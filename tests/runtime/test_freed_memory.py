"""What a step frees stays with the process, so that the next one fetches no pages; large tensors lie in huge pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rota.runtime.host_memory import HUGE_PAGES
from rota.runtime.launching import launch

SCRIPT = """
import ctypes, resource
from rota.runtime.host_memory import keep_freed_memory

keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
size = 8 << 20
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers = [libc.malloc(size) for _ in range(8)]
    for buffer in buffers:
        libc.memset(buffer, 1, size)
    for buffer in buffers:
        libc.free(buffer)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def fetched_pages(**environment: str) -> list[int]:
    """How many pages each of four steps fetches for its buffers."""
    ours = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    command = sys.executable, "-c", SCRIPT
    done = subprocess.run(command, env=ours | environment, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_only_the_first_step_fetches_pages() -> None:
    first, *others = fetched_pages()
    assert max(others) < 100 < first


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_the_user_s_own_settings_are_left_as_they_are() -> None:
    _, *others = fetched_pages(MALLOC_TRIM_THRESHOLD_=str(1 << 20))
    assert min(others) > 1000


# --- huge pages -------------------------------------------------------------------------------------------------------


def test_ranks_ask_for_huge_pages_unless_the_user_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, value),) = HUGE_PAGES.items()
    monkeypatch.delenv(name, raising=False)
    assert launch._inherited()[name] == value
    monkeypatch.setenv(name, "0")
    assert launch._inherited()[name] == "0"
