"""Memory files in huge pages: they hold what was written, in memory that is there and that others map at once."""

from __future__ import annotations

import mmap
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.runtime.kept_memory import KeptMemories, Slots, room_for
from rota.runtime.mapped_file import HUGE_BYTES, MappedFile


@pytest.fixture
def file() -> Iterator[int]:
    number = os.memfd_create("test")
    yield number
    os.close(number)


def allocated_bytes(file: int) -> int:
    return 512 * os.fstat(file).st_blocks


def in_huge_pages(view: memoryview) -> int:
    """Bytes of this process's shared mapping around `view` that huge pages map."""
    import torch

    address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", part):
            start, end = (int(word, 16) for word in found.groups())
            if start <= address < end:
                return 1024 * int(re.findall(r"^ShmemPmdMapped:\s+(\d+)", part, re.MULTILINE)[0])
    raise AssertionError("not mapped")


@pytest.mark.parametrize("num_bytes", [1, mmap.PAGESIZE, HUGE_BYTES, 3 * HUGE_BYTES, 3 * HUGE_BYTES + 5000])
def test_a_filled_part_has_all_of_its_memory(file: int, num_bytes: int) -> None:
    os.ftruncate(file, HUGE_BYTES + num_bytes)
    mapping = MappedFile(file, HUGE_BYTES + num_bytes)
    mapping.fill(HUGE_BYTES, num_bytes)
    mapping.map_now(HUGE_BYTES, num_bytes)
    assert num_bytes <= allocated_bytes(file) <= num_bytes + HUGE_BYTES
    assert len(mapping.view) == HUGE_BYTES + num_bytes
    mapping.view[HUGE_BYTES:] = bytes([7]) * num_bytes
    mapping.view[0:1] = b"x"
    assert bytes(MappedFile(file, HUGE_BYTES + num_bytes).view[HUGE_BYTES:]) == bytes([7]) * num_bytes
    assert os.pread(file, 2, 0) == b"x\0"


def test_a_part_keeps_what_it_holds_when_it_is_mapped_now(file: int) -> None:
    content = os.urandom(2 * HUGE_BYTES)
    os.pwrite(file, content, 0)
    mapping = MappedFile(file, len(content))
    mapping.map_now(0, len(content))
    assert mapping.view == content


def test_a_view_outlives_its_mapping(file: int) -> None:
    os.ftruncate(file, mmap.PAGESIZE)
    view = MappedFile(file, mmap.PAGESIZE).view[3:]
    view[0] = 5
    assert os.pread(file, 4, 0)[3] == 5


def test_a_mapping_without_views_is_gone(file: int) -> None:
    def num_mappings() -> int:
        return Path("/proc/self/maps").read_text().count(f"memfd:{name}")

    os.ftruncate(file, mmap.PAGESIZE)
    name = "test"
    before = num_mappings()
    mapping = MappedFile(file, mmap.PAGESIZE)
    assert num_mappings() == before + 1
    del mapping
    assert num_mappings() == before


def test_a_file_that_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    number = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=r"denied|device|Bad file"):
            MappedFile(number, mmap.PAGESIZE)
    finally:
        os.close(number)


def test_large_states_lie_in_huge_pages_also_in_the_next_process() -> None:
    if tuple(int(part) for part in platform.release().split(".")[:2]) < (6, 1) or mmap.PAGESIZE != 4096:
        pytest.skip("this system has no MADV_COLLAPSE, or pages of another size")
    with KeptMemories(1) as kept:
        slots = Slots(kept.files[0])
        size = 2 * HUGE_BYTES
        for step in (1, 2):
            slots.begin(size)[:] = bytes([step]) * size
            slots.finish(step, size)
        again = Slots(kept.files[0])
        assert {step: bytes(again.data(step)[-1:]) for step in again.steps} == {1: b"\1", 2: b"\2"}
        assert in_huge_pages(again.data(1)) >= size


def test_a_state_that_grows_moves_behind_the_other_one() -> None:
    """From small pages to huge ones, and back: the older state stays what it was."""
    sizes = [100, 3 * HUGE_BYTES, 5 * HUGE_BYTES, 10, 6 * HUGE_BYTES]
    with KeptMemories(1) as kept:
        slots = Slots(kept.files[0])
        for step, size in enumerate(sizes):
            slots.begin(size)[:] = bytes([step]) * size
            slots.finish(step, size)
            for held in slots.steps:
                assert bytes(slots.data(held)) == bytes([held]) * sizes[held]
        assert sorted(slots.steps) == [3, 4]
        # What slots have outgrown is free again: the rooms of steps 3 and 4 are left, the former that of step 1.
        assert slots.allocated_bytes <= room_for(sizes[1]) + room_for(sizes[4]) + 2 * HUGE_BYTES
        slots.clear()
        assert slots.steps == {}
        assert slots.allocated_bytes == mmap.PAGESIZE
        slots.begin(5000)[:] = b"x" * 5000
        slots.finish(7, 5000)
        assert bytes(Slots(kept.files[0]).data(7)) == b"x" * 5000
