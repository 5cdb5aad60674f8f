"""Copies of large tensors that go past the caches: half the time where they do not fit there.

An ordinary store first reads the line that it overwrites. glibc's memmove stores large blocks without that. By default,
large may mean more than 100 MB, as it goes by the caches that the processor claims to have. It reads another limit from
the environment when a process starts.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TUNABLES = "GLIBC_TUNABLES"
_LARGE_BYTES = 2 << 20
_OURS = f"glibc.cpu.x86_non_temporal_threshold={_LARGE_BYTES}"


def with_large_copies(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process in which `copy` shall be fast. What the user has set there is left as it is."""
    if platform.machine() != "x86_64" or _TUNABLES in environment:
        return dict(environment)
    return {**environment, _TUNABLES: _OURS}


def forget_variable() -> None:
    """Do not pass the variable on to child processes, now that it has had its effect on this one."""
    if os.environ.get(_TUNABLES) == _OURS:
        del os.environ[_TUNABLES]


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)` for tensors of the same size and dtype.

    Raises ValueError if the memory of one was freed.
    """
    if all(_is_plain(tensor) for tensor in (target, source)):
        ctypes.memmove(_address_of(target), _address_of(source), source.nbytes)
    else:
        target.copy_(source)


def copy_into(memory: memoryview, starts: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
    """Copy each tensor's values, one after the other, to the byte of `memory` at which its place starts.

    Of a small tensor, most of the time would go into making a tensor of its place. Raises ValueError if a tensor has no
    such place, or if its memory was freed.
    """
    import torch

    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if len(memory) else 0
    for start, source in zip(starts, sources, strict=True):
        num_bytes = source.nbytes
        if not 0 <= start <= len(memory) - num_bytes:
            raise ValueError(f"bytes {start} to {start + num_bytes} are beyond {len(memory)} bytes of memory")
        if _is_plain(source):
            ctypes.memmove(address + start, _address_of(source), num_bytes)
        elif num_bytes:
            place = torch.frombuffer(memory[start : start + num_bytes], dtype=source.dtype)
            place.view(source.shape).copy_(source)


def _address_of(tensor: torch.Tensor) -> int:
    """Where the values are. A storage that was resized to nothing, as FSDP frees memory, is at address 0."""
    address: int = tensor.data_ptr()
    if not address and tensor.numel():
        raise ValueError(f"the memory of a tensor of size {list(tensor.shape)} was freed, so it has no values to copy")
    return address


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the values lie in the host's memory one after the other, as they are."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
