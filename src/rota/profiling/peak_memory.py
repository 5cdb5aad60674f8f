"""Memory during a run: the peak in each of its parts, and the memory held after them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, final

import torch

from rota.profiling.clocks import Run
from rota.runtime.device.protocol import Device, QueuedDevice, is_queued
from rota.runtime.memory_watch import LiveStorages
from rota.torch_internals import TorchDispatchMode, address_of


@final
class StorageWatch(TorchDispatchMode):
    """Counts in `live` every storage that an operation makes while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveStorages()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.live.see(made, (args, kwargs))
        return made


class _Level(NamedTuple):
    most_bytes: int  # in the part that ends here
    bytes: int  # here


def peaks(run: Run, device: Device) -> list[int]:
    """For each part of `run`, its peak in bytes above what is held before or after it, whichever is more.

    On a queued device its allocator measures it, which allocates when the host enqueues: the host need not wait. On the
    CPU, the tensors that operations make count, without memory that a kernel allocates for itself.
    """
    levels: list[_Level] = []
    if is_queued(device):
        run(lambda: levels.append(_allocated(device)))
    else:
        watch = StorageWatch()
        with watch:
            run(lambda: levels.append(_level(watch.live)))
    return [max(end.most_bytes - max(start.bytes, end.bytes), 0) for start, end in pairwise(levels)]


def _level(live: LiveStorages) -> _Level:
    now, most = live.num_bytes(), live.peak_bytes
    live.peak_bytes = 0
    return _Level(max(now, most), now)


def _allocated(device: QueuedDevice) -> _Level:
    most = device.peak_bytes()
    device.reset_peak()
    return _Level(most, device.peak_bytes())


def copier(contiguous: bool) -> Callable[[Any], Any]:
    """A function that copies tensors: with their layout and shared storages, or each contiguous on its own.

    A message arrives contiguous; a value of the same process keeps its layout.
    """
    made: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if contiguous:
                copied = tensor.clone(memory_format=torch.contiguous_format)
            else:
                storage = tensor.untyped_storage()
                if (address := address_of(storage)) not in made:
                    num_elements = storage.nbytes() // tensor.element_size()
                    made[address] = tensor.detach().as_strided((num_elements,), (1,), 0).clone()  # all of the storage
                whole = made[address].view(tensor.dtype)
                copied = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()
        return copied.requires_grad_(tensor.requires_grad)

    return copy
