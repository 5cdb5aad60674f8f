"""Streams with vector clocks, events, blocks of memory, and the host that waits for them.

A stream's clock has, for each stream, how many of its kernels are over when the stream's next kernel starts. A kernel
may read what another one wrote only if its stream's clock covers that one; events carry clocks from stream to stream:

    compute   k1  k2 ─ record ─┐      clock {compute: 2}
    0→1                        └ wait ─ k1      clock {compute: 2, 0→1: 1}: after k1 and k2 of compute
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch

from support import device_guard

Clock = dict[int, int]

_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(__file__)


class RaceError(AssertionError):
    """No event orders two accesses to the same memory."""


class FreedTooEarlyError(AssertionError):
    """Memory was freed, and may be reused at once, while another stream may still use it."""


class HostSync(NamedTuple):
    """The host waited for the device: in which operation, or in which function for an event; from which line."""

    operation: str
    where: str


class Stream:
    """A queue of kernels of one device."""

    _numbers = itertools.count(1)  # to PyTorch 0 is the default stream, of whichever device is active

    def __init__(self, device: SimDevice, name: str = "") -> None:
        self.number, self.device = next(Stream._numbers), device
        self.name = name or f"stream {self.number}"
        self.clock: Clock = {}
        self.last = "its start"  # its last kernel
        self.free_ns = 0  # when its last kernel ends, in ns of the monotonic clock
        _streams[self.number] = self
        device.streams.append(self)

    def wait_event(self, event: Event) -> None:
        """Kernels that come from now on start after the event."""
        with self.device.lock:
            _merge(self.clock, event.clock)
            self.free_ns = max(self.free_ns, event.time_ns)

    def __repr__(self) -> str:
        return self.name


class Event:
    """A point in a stream, behind all kernels that it has got so far."""

    _numbers = itertools.count(1)

    def __init__(self, stream: Stream, is_timed: bool, number: int = 0) -> None:
        """`number`: of an event that is recorded again, which another thread may be asking for."""
        self.number, self._device, self._is_timed = number or next(Event._numbers), stream.device, is_timed
        with self._device.lock:
            _merge(stream.clock, self._device.host)
            self.clock: Clock = dict(stream.clock)
            self.time_ns = max(stream.free_ns, self._device.now_ns)
        _events[self.number] = self

    def query(self) -> bool:
        """Whether the device has got there, as far as the host knows then."""
        device = self._device
        with device.lock:
            if device.cost_ns is not None and device.now_ns >= self.time_ns:
                device.host_knows(self.clock)
            return _covers(device.host, self.clock)

    def synchronize(self) -> None:
        """The host waits for it, which is counted if the host did not know that it was reached."""
        if not self.query():
            self._device.host_waits(self.clock, sys._getframe(3).f_code.co_qualname, self.time_ns)

    def elapsed_ns(self, later: Event) -> int:
        """To a later one; NO_TIME, for which PyTorch raises an error, unless both have times and were reached."""
        is_known = all(event._is_timed and event.query() for event in (self, later))
        return later.time_ns - self.time_ns if is_known else device_guard.NO_TIME


class _Access(NamedTuple):
    stream: Stream
    count: int
    name: str


class Block:
    """One allocation, its last write, and the reads since then by stream."""

    __slots__ = ("__weakref__", "device", "num_bytes", "owner", "reads", "recorded", "what", "write")

    def __init__(self, device: SimDevice, num_bytes: int, what: str, made_by: str | None = None) -> None:
        """`made_by`: the kernel that has just written to it; None: nothing has."""
        self.device, self.num_bytes, self.what = device, num_bytes, what
        self.owner = device.current_stream
        # Kernels of the owner may have used the memory before: whoever else writes to it comes after them.
        name = made_by or f"the allocation of {what} on {self.owner}, after {self.owner.last}"
        self.write = _last_access(self.owner, name)
        self.reads: dict[int, _Access] = {}
        self.recorded: set[int] = set()
        device.count_bytes(num_bytes)

    def record_stream(self, stream: torch.Stream) -> None:
        """When the block is freed, it is reused only after what `stream` has got by then."""
        self.recorded.add(_streams[stream.stream_id].number)

    def __del__(self) -> None:
        self.device.free(self)


class SimDevice:
    """One rank's device and host.

    An event is done only when the host has waited for it, as on a device that is far behind its host. `cost_ns`: what
    each kernel lasts, by its name and the blocks that it writes to. With it kernels of a stream run one after another,
    and events have times: in a time of the device's own, in which the host takes `host_ns` for a kernel, however busy
    the machine is.
    """

    #: Errors are raised by `check` alone, not by the kernel that makes them, so that other ranks do not wait in vain.
    goes_on = False

    def __init__(
        self,
        name: str = "sim",
        *,
        cost_ns: Callable[[str, Sequence[Block]], int] | None = None,
        host_ns: int | None = None,
    ) -> None:
        self._host_ns, self._own_ns = host_ns, 0
        self.name, self.cost_ns = name, cost_ns
        self.lock = threading.RLock()
        self.host: Clock = {}  # what the host has waited for
        self.streams: list[Stream] = []
        self.default = Stream(self, "the default stream")
        self.num_kernels = 0
        self.syncs: list[HostSync] = []
        self.allocated_bytes, self.peak_bytes = 0, 0
        self._copies: list[tuple[Clock, torch.Tensor, torch.Tensor]] = []  # to the host, which it has not waited for
        self._found: list[AssertionError] = []
        self.rng_state = torch.Generator().manual_seed(0).get_state()

    def __repr__(self) -> str:
        return self.name

    # --- streams ------------------------------------------------------------------------------------------------------

    @property
    def current_stream(self) -> Stream:
        """The stream that this thread's kernels go to."""
        stream = _current_stream()
        return self.default if stream is None or stream.device is not self else stream

    @contextmanager
    def active(self) -> Iterator[None]:
        """Tensors that are made on "sim" are on this device, and threads begin with its default stream.

        Backwards run in this thread where autograd's engine has none for the device, see `tensors.py`.
        """
        before = _streams.get(0)
        _streams[0] = self.default
        try:
            with torch.autograd.set_multithreading_enabled(HAS_THREADS[0]):
                yield
        finally:
            _streams.pop(0)
            if before is not None:
                _streams[0] = before

    @contextmanager
    def checked(self) -> Iterator[SimDevice]:
        """As `active`; raises at the end what `check` raises, rather than an error that may follow from it."""
        with self.active():
            try:
                yield self
            finally:
                self.check()

    # --- kernels ------------------------------------------------------------------------------------------------------

    def launch(
        self, name: str, reads: Iterable[Block] = (), writes: Iterable[Block] = (), lasts_ns: int | None = None
    ) -> None:
        """A kernel on the current stream. Raises RaceError and FreedTooEarlyError, see `check`."""
        with self.lock:
            if not self.goes_on:
                self.check()
            stream = self.current_stream
            clock = stream.clock
            _merge(clock, self.host)
            clock[stream.number] = clock.get(stream.number, 0) + 1
            written = {id(block): block for block in writes}
            for block in reads:
                if id(block) not in written:
                    self._order(name, "reads", block, block.write, stream)
            for block in written.values():
                for access in (block.write, *block.reads.values()):
                    self._order(name, "writes", block, access, stream)
            access = _last_access(stream, name)
            for block in reads:
                block.reads[stream.number] = access
            for block in written.values():
                block.write, block.reads = access, {}
            self.num_kernels += 1
            stream.last = name
            if self.cost_ns is not None:
                lasts_ns = self.cost_ns(name, [*written.values()]) if lasts_ns is None else lasts_ns
                self._own_ns += self._host_ns or 0
                stream.free_ns = max(stream.free_ns, self.now_ns) + lasts_ns

    def _order(self, name: str, does: str, block: Block, before: _Access, stream: Stream) -> None:
        if before.stream is stream or stream.clock.get(before.stream.number, 0) >= before.count:
            return
        self._found.append(
            RaceError(
                f"{name} on {stream} {does} {block.what}, but no event orders it after {before.name} on {before.stream}"
            )
        )
        if not self.goes_on:
            self.check()

    def check(self) -> None:
        """Raise the first error that was found where none can be raised, since the last call: where memory is freed."""
        if self._found:
            found, self._found = self._found, []
            raise found[0]

    def copies_later(self, to_host: torch.Tensor) -> None:
        """The last kernel has written to this tensor of the host, which has its values once the host has waited."""
        with self.lock:
            self._copies.append((dict(self.current_stream.clock), to_host, to_host.clone()))
            to_host.fill_(math.nan if to_host.is_floating_point() else 77)

    # --- memory -------------------------------------------------------------------------------------------------------

    def count_bytes(self, num_bytes: int) -> None:
        """Memory was allocated."""
        with self.lock:
            self.allocated_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def free(self, block: Block) -> None:
        """The last tensor of a block is gone: its owner may reuse it at once."""
        with self.lock:
            self.allocated_bytes -= block.num_bytes
            owner = block.owner
            for access in (block.write, *block.reads.values()):
                stream = access.stream
                if stream is owner or stream.number in block.recorded:
                    continue
                if max(owner.clock.get(stream.number, 0), self.host.get(stream.number, 0)) < access.count:
                    reused = f"{block.what} was freed, and {owner} may reuse it"
                    self._found.append(
                        FreedTooEarlyError(f"{reused}, while {access.name} on {stream} may still use it")
                    )

    # --- the host -----------------------------------------------------------------------------------------------------

    def host_waits(self, clock: Clock, operation: str, until_ns: int = 0) -> None:
        """The host waits, which is counted; until a time of the monotonic clock, where kernels have times."""
        self._pass_until(until_ns)
        self.host_knows(clock)
        self.syncs.append(HostSync(operation, _line_of_code()))

    def host_knows(self, clock: Clock) -> None:
        """The device has got there, and the host knows it; what was copied to it has arrived."""
        with self.lock:
            _merge(self.host, clock)
            arrived = [copy for copy in self._copies if _covers(self.host, copy[0])]
            self._copies = [copy for copy in self._copies if not _covers(self.host, copy[0])]
            for _, to_host, values in arrived:
                to_host.data.copy_(values)

    def synchronize(self) -> None:
        """The host waits for all streams."""
        for stream in self.streams:
            self._pass_until(stream.free_ns)
            self.host_knows(stream.clock)
        self.syncs.append(HostSync("synchronize", _line_of_code()))

    @property
    def now_ns(self) -> int:
        """The host's clock."""
        return time.monotonic_ns() if self._host_ns is None else self._own_ns

    def _pass_until(self, time_ns: int) -> None:
        if self._host_ns is not None:
            self._own_ns = max(self._own_ns, time_ns)
        else:
            time.sleep(max(time_ns - time.monotonic_ns(), 0) / 1e9)


# --- what PyTorch asks ------------------------------------------------------------------------------------------------

_streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
_events: dict[int, Event] = {}
#: Whether autograd's engine has a thread for the device.
HAS_THREADS = [True]


def current_device() -> SimDevice:
    """The device of this thread's current stream."""
    stream = _current_stream()
    if stream is None:
        raise RuntimeError("no simulated device is active: with SimDevice().active(): …")
    return stream.device


def _current_stream() -> Stream | None:
    return _streams.get(_library.current_stream())


def _record(event: int, stream: int, is_timed: bool) -> int:
    return Event(_streams[stream], is_timed, event).number


def _reset_peak() -> None:
    device = current_device()
    device.peak_bytes = device.allocated_bytes


_library = device_guard.load(
    {
        "new_stream": lambda _, __: Stream(current_device()).number,
        "record": lambda event, stream: _record(event, stream, is_timed=False),
        "record_timed": lambda event, stream: _record(event, stream, is_timed=True),
        "wait": lambda event, stream: _streams[stream].wait_event(_events[event]) or 0,
        "is_done": lambda event, _: _events[event].query(),
        "host_waits": lambda event, _: _events[event].synchronize() or 0,
        "host_waits_for_all": lambda _, __: current_device().synchronize() or 0,
        "elapsed": lambda event, later: _events[event].elapsed_ns(_events[later]),
        "forget": lambda event, _: _events.pop(event, None) is None,
        "peak_bytes": lambda _, __: current_device().peak_bytes,
        "reset_peak": lambda _, __: _reset_peak() or 0,
    }
)


def _last_access(stream: Stream, name: str) -> _Access:
    return _Access(stream, stream.clock.get(stream.number, 0), name)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


def _covers(clock: Clock, other: Clock) -> bool:
    return all(clock.get(stream, 0) >= count for stream, count in other.items())


def _line_of_code() -> str:
    """The innermost frame that is neither PyTorch's nor the simulated device's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    node = torch._C._current_autograd_node()
    return f"the backward of {node.name()}" if node is not None else "a thread without Python code"
