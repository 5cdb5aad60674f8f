"""Large copies are what `copy_` makes; a process that is started for them has the limit, and does not pass it on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rota.runtime import large_copies

_LOADER = Path("/lib64/ld-linux-x86-64.so.2")

SOURCES: dict[str, Callable[[], torch.Tensor]] = {
    "large": lambda: torch.randn(3, 1 << 20),
    "bfloat16": lambda: torch.randn(1000).bfloat16(),
    "a number": lambda: torch.tensor(7, dtype=torch.int64),
    "empty": lambda: torch.zeros(0, 3),
    "a parameter": lambda: torch.nn.Parameter(torch.randn(5, 3)).detach(),
    "a part": lambda: torch.randn(9, 8)[2:7],
    "transposed": lambda: torch.randn(6, 4).t(),
    "every other": lambda: torch.randn(20)[::2],
    "repeated": lambda: torch.randn(1, 4).expand(3, 4),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "on meta": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_copy_has_the_same_values(kind: str) -> None:
    source = SOURCES[kind]()
    target = torch.zeros_like(source)
    expected = torch.zeros_like(source).copy_(source)
    large_copies.copy(target, source)
    if kind != "on meta":
        assert torch.equal(target.to_dense(), expected.to_dense())


@pytest.mark.parametrize("kind", [kind for kind in SOURCES if kind not in ("sparse", "on meta")])
def test_a_copy_into_memory_has_the_same_bytes_and_touches_no_others(kind: str) -> None:
    source = SOURCES[kind]()
    expected = source.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    memory = bytearray(b"\xaa") * (2 * len(expected) + 64)
    large_copies.copy_into(memoryview(memory), [16, len(expected) + 48], [source, source])
    filler = b"\xaa" * 16
    assert bytes(memory) == filler + expected + 2 * filler + expected + filler


def test_a_copy_beyond_the_memory_is_refused() -> None:
    memory = bytearray(64)
    for start in (-1, 57):
        with pytest.raises(ValueError, match="beyond 64 bytes"):
            large_copies.copy_into(memoryview(memory), [start], [torch.ones(1, dtype=torch.float64)])
    assert bytes(memory) == bytes(64)
    large_copies.copy_into(memoryview(b""), [0], [torch.zeros(0)])


def test_memory_that_was_freed_is_refused() -> None:
    freed = torch.ones(3, 2)
    freed.untyped_storage().resize_(0)
    memory = bytearray(64)
    for copy in (
        lambda: large_copies.copy_into(memoryview(memory), [0], [freed]),
        lambda: large_copies.copy(torch.ones(3, 2), freed),
        lambda: large_copies.copy(freed, torch.ones(3, 2)),
    ):
        with pytest.raises(ValueError, match=r"the memory of a tensor of size \[3, 2\] was freed"):
            copy()
    assert bytes(memory) == bytes(64)


def test_a_target_that_is_not_in_one_piece_gets_the_values_in_order() -> None:
    target, source = torch.zeros(4, 6).t(), torch.randn(6, 4)
    large_copies.copy(target, source)
    assert torch.equal(target, source)


def test_what_the_user_has_set_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2", "HOME": "/"}
    assert large_copies.with_large_copies(given) == given
    monkeypatch.setenv(*next(iter(given.items())))
    large_copies.forget_variable()
    assert os.environ["GLIBC_TUNABLES"] == given["GLIBC_TUNABLES"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variable is for x86-64 alone")
def test_the_variable_has_its_effect_when_a_process_starts_and_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = large_copies.with_large_copies({})
    if _LOADER.exists():  # glibc's
        told = subprocess.run([_LOADER, "--list-tunables"], env=ours, capture_output=True, text=True, check=True).stdout
        (line,) = (line for line in told.splitlines() if line.startswith("glibc.cpu.x86_non_temporal_threshold:"))
        assert int(line.split()[1], 16) == large_copies._LARGE_BYTES
    monkeypatch.setenv(*next(iter(ours.items())))
    large_copies.forget_variable()
    assert "GLIBC_TUNABLES" not in os.environ
