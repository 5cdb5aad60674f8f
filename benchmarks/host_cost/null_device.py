"""PyTorch's accelerator API without an accelerator: each call is one method of Python that does nothing.

Tensors are on the CPU, and messages go by PyTorch's fake process group, whose sends and receives are done at once. So
one process runs only one rank, and what takes time is the host's part of a step. Values are meaningless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the group

from rota.runtime import engine
from rota.runtime.device.streams import StreamDevice


class Event:
    """For `torch.Event`."""

    __slots__ = ()

    def __init__(self, device: Any = None, *, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: Event) -> float:
        return 0.0


class Stream:
    """For `torch.Stream`."""

    current: ClassVar[Stream]
    __slots__ = ("_before",)

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Stream:
        self._before, Stream.current = Stream.current, self
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._before


Stream.current = Stream()


def current_stream(_: Any = None) -> Stream:
    """For `torch.accelerator.current_stream`."""
    return Stream.current


def nothing(*_: object) -> int:
    """For all other functions of the API."""
    return 0


def _read(_: StreamDevice, tensor: torch.Tensor) -> Callable[[], list[float]]:
    """As `StreamDevice.read`, but the copy is not in pinned memory, which needs an accelerator."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor, non_blocking=True)
    copied = current_stream().record_event()

    def numbers() -> list[float]:
        copied.synchronize()
        found: list[float] = copy.tolist()
        return found

    return numbers


@contextmanager
def installed(rank: int, num_ranks: int) -> Iterator[None]:
    """Rank `rank` of `num_ranks`, alone, on this device: Rota runs its `StreamDevice`, as it does on CUDA."""
    torch.Stream, torch.Event = Stream, Event  # type: ignore[misc, assignment]
    accelerator: Any = torch.accelerator
    accelerator.current_stream = current_stream
    for name in ("set_device_index", "reset_peak_memory_stats", "synchronize", "max_memory_allocated"):
        setattr(accelerator, name, nothing)
    module: Any = torch.get_device_module("cpu")
    module.manual_seed, module.set_rng_state = nothing, nothing
    module.get_rng_state = nothing
    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[assignment, method-assign, misc]
    StreamDevice.read = _read  # type: ignore[assignment, method-assign]
    dist.Backend.default_device_backend_map["cpu"] = "fake"
    engine.device_at = StreamDevice
    make = dist.new_group
    dist.new_group = lambda ranks, timeout, *_, **__: make(ranks, timeout, backend="fake")
    torch.set_flush_denormal(True)  # what was in memory before is what a receive leaves, and the CPU is slow on such
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=num_ranks)
    yield
    dist.destroy_process_group()


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """The calls of the API inside the context, by name."""
    found: Counter[str] = Counter()
    accelerator: Any = torch.accelerator
    places: list[tuple[Any, str]] = [(accelerator, "current_stream"), (Event, "record"), (Event, "elapsed_time")]
    places += [(Stream, name) for name in ("record_event", "wait_event", "wait_stream", "__enter__", "__exit__")]
    before = [(on, name, getattr(on, name)) for on, name in places]
    for on, name, original in before:
        setattr(on, name, _counted(name, original, found))
    try:
        yield found
    finally:
        for on, name, original in before:
            setattr(on, name, original)


def _counted(name: str, original: Callable[..., Any], found: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        found[name] += 1
        return original(*args)

    return call
