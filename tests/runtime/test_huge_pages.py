"""Memory that is laid in huge pages holds what it held, also after forked processes have written to it."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rota.runtime.huge_pages import lay_in_huge_pages

SCRIPT = """
import hashlib, json, mmap, os, re
from rota.runtime.huge_pages import lay_in_huge_pages

def digests():
    return [hashlib.sha256(held).hexdigest() for held in (mapped, allocated)]

def huge_kib():
    return sum(map(int, re.findall(r"^AnonHugePages: +([0-9]+)", open("/proc/self/smaps").read(), re.MULTILINE)))

mapped = mmap.mmap(-1, 12 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
mapped[: 9 << 20] = os.urandom(9 << 20)  # the rest has no memory
allocated = bytearray(os.urandom(9 << 20))
small = [os.urandom(100) for _ in range(50_000)]
of_small = hash(b"".join(small))
before, huge_before = digests(), huge_kib()
lay_in_huge_pages()
after, huge_after = digests(), huge_kib()
if not os.fork():
    for at in range(0, 9 << 20, 70_000):
        mapped[at] = allocated[at] = 1
    os._exit(9 if digests() != before else 0)
changed = os.waitstatus_to_exitcode(os.wait()[1])
print(json.dumps([before, after, digests(), of_small == hash(b"".join(small)), changed, huge_before, huge_after]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no huge pages to ask for")
def test_what_memory_holds_stays_as_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, after, after_writes, is_small_same, changed, huge_before, huge_after = json.loads(done.stdout)
    assert before == after == after_writes
    assert is_small_same
    assert changed == 9
    if huge_after == huge_before:
        pytest.skip("this system lays nothing in huge pages")
    assert huge_after >= huge_before + (8 << 10)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no huge pages to ask for")
@pytest.mark.parametrize("name", [b"m\xfcller", b"a\x0cb", b"a\rb", b"a\nb", b"a b", "a\u2028b".encode()])
def test_mapped_files_may_have_any_name(tmp_path: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(tmp_path), name)
    with open(path, "wb+") as file:
        file.write(b"x")
        file.flush()
        with mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ) as mapped:
            lay_in_huge_pages()
            assert mapped[:] == b"x"
