"""Streams with vector clocks, events, blocks of memory, and the host that waits for them.

A stream's clock has, for each stream, how many of its kernels are over when the stream's next kernel starts. A kernel
may read what another one wrote only if its stream's clock covers that one; events carry clocks from stream to stream:

    compute   k1  k2 ─ record ─┐      clock {compute: 2}
    0→1                        └ wait ─ k1      clock {compute: 2, 0→1: 1}: after k1 and k2 of compute
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

Clock = dict[int, int]

_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(__file__)
_OUTSIDE_OF_BACKWARD = -1
_ACCUMULATE_GRAD = 2**64 - 1  # the sequence number of nodes that add to `.grad`


class RaceError(AssertionError):
    """No event orders two accesses to the same memory."""


class FreedTooEarlyError(AssertionError):
    """Memory was freed, and may be reused at once, while another stream may still use it."""


class HostSync(NamedTuple):
    """The host waited for the device: in which operation, and from which line of code."""

    operation: str
    where: str


class Stream:
    """A queue of kernels of one device."""

    _ids = itertools.count()

    def __init__(self, device: SimDevice, name: str) -> None:
        self.id, self.device, self.name = next(Stream._ids), device, name
        self.clock: Clock = {}
        self.last = "its start"  # its last kernel
        self.free_ns = 0  # when its last kernel ends, in ns of the monotonic clock

    def wait_event(self, event: Event) -> None:
        """Kernels that come from now on start after the event."""
        with self.device.lock:
            _merge(self.clock, event.clock)
            self.free_ns = max(self.free_ns, event.time_ns)

    def record_event(self) -> Event:
        """An event behind all kernels so far."""
        return Event(self)

    def __repr__(self) -> str:
        return self.name


class Event:
    """A point in a stream, behind all kernels that it has got so far."""

    def __init__(self, stream: Stream) -> None:
        self._device = stream.device
        with self._device.lock:
            _merge(stream.clock, self._device.host)
            self.clock: Clock = dict(stream.clock)
            self.time_ns = max(stream.free_ns, self._device.now_ns)

    def query(self) -> bool:
        """Whether the device has got there, as far as the host knows then."""
        device = self._device
        with device.lock:
            if device.cost_ns is not None and device.now_ns >= self.time_ns:
                _merge(device.host, self.clock)
            return _covers(device.host, self.clock)


class _Access(NamedTuple):
    stream: Stream
    count: int
    name: str
    backward: int
    clock: Clock | None  # of accesses in a backward, whose engine orders them


class Block:
    """One allocation, its last write, and the reads since then by stream."""

    __slots__ = ("__weakref__", "device", "num_bytes", "owner", "reads", "recorded", "what", "write")

    def __init__(self, device: SimDevice, num_bytes: int, what: str, made_by: str | None = None) -> None:
        """`made_by`: the kernel that has just written to it; None: nothing has."""
        self.device, self.num_bytes, self.what = device, num_bytes, what
        self.owner = device.stream_of_kernel()
        # Kernels of the owner may have used the memory before: whoever else writes to it comes after them.
        name = made_by or f"the allocation of {what} on {self.owner}, after {self.owner.last}"
        self.write = device.last_access(self.owner, name)
        self.reads: dict[int, _Access] = {}
        self.recorded: set[int] = set()
        device.count_bytes(num_bytes)

    def record_stream(self, stream: Stream) -> None:
        """When the block is freed, it is reused only after what `stream` has got by then."""
        self.recorded.add(stream.id)

    def __del__(self) -> None:
        self.device.free(self)


class SimDevice:
    """One rank's device and host.

    An event is done only when the host has waited for it, as on a device that is far behind its host. `goes_on`: errors
    are raised by `check` alone, not by the kernel that makes them, so that other ranks do not wait in vain. `cost_ns`:
    what each kernel lasts, by its name and the blocks that it writes to. With it kernels of a stream run one after
    another, and events have times: in a time of the device's own, in which the host takes `host_ns` for a kernel,
    however busy the machine is.
    """

    def __init__(
        self,
        name: str = "sim",
        *,
        goes_on: bool = False,
        cost_ns: Callable[[str, Sequence[Block]], int] | None = None,
        host_ns: int | None = None,
    ) -> None:
        self._host_ns, self._own_ns = host_ns, 0
        self.name, self.goes_on, self.cost_ns = name, goes_on, cost_ns
        self.lock = threading.RLock()
        self.host: Clock = {}  # what the host has waited for
        self.default = Stream(self, "compute")
        self.streams = {"compute": self.default}
        self._current = [self.default]
        self.num_kernels = 0
        self.syncs: list[HostSync] = []
        self.allocated_bytes, self.peak_bytes = 0, 0
        self._found: list[AssertionError] = []
        self.rng_state = torch.Generator().manual_seed(0).get_state()
        self._last_node = -1
        self._stream_of_node: dict[int, Stream] = {}  # of forwards that were not on the default stream
        self._backwards: dict[int, set[Stream]] = {}
        self._last_in_backward = self.default

    def __repr__(self) -> str:
        return self.name

    # --- streams ------------------------------------------------------------------------------------------------------

    def stream(self, name: str) -> Stream:
        """The stream of this name; a new one the first time."""
        return self.streams.setdefault(name, Stream(self, name))

    @property
    def current_stream(self) -> Stream:
        """The stream that the host's kernels go to."""
        return self._current[-1]

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Send the host's kernels to `stream`."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Tensors that this thread makes on "sim" are on this device."""
        before = getattr(_thread, "device", None)
        _thread.device = self
        try:
            yield
        finally:
            _thread.device = before

    @contextmanager
    def checked(self) -> Iterator[SimDevice]:
        """As `active`; raises at the end what `check` raises."""
        with self.active():
            yield self
        self.check()

    # --- kernels ------------------------------------------------------------------------------------------------------

    def launch(
        self,
        name: str,
        reads: Iterable[Block] = (),
        writes: Iterable[Block] = (),
        stream: Stream | None = None,
        lasts_ns: int | None = None,
    ) -> None:
        """A kernel on `stream`, or on the current one. Raises RaceError and FreedTooEarlyError, see `check`."""
        with self.lock:
            backward = torch._C._current_graph_task_id()
            if backward == _OUTSIDE_OF_BACKWARD and not self.goes_on:
                self.check()
            stream = self.stream_of_kernel() if stream is None else stream
            clock = stream.clock
            _merge(clock, self.host)
            clock[stream.id] = clock.get(stream.id, 0) + 1
            written = {id(block): block for block in writes}
            for block in reads:
                if id(block) not in written:
                    self._order(name, "reads", block, block.write, stream, backward)
            for block in written.values():
                for access in (block.write, *block.reads.values()):
                    self._order(name, "writes", block, access, stream, backward)
            access = self.last_access(stream, name)
            for block in reads:
                block.reads[stream.id] = access
            for block in written.values():
                block.write, block.reads = access, {}
            self.num_kernels += 1
            stream.last = name
            if self.cost_ns is not None:
                lasts_ns = self.cost_ns(name, [*written.values()]) if lasts_ns is None else lasts_ns
                self._own_ns += self._host_ns or 0
                stream.free_ns = max(stream.free_ns, self.now_ns) + lasts_ns

    def last_access(self, stream: Stream, name: str) -> _Access:
        """The access of the last kernel of `stream`."""
        backward = torch._C._current_graph_task_id()
        kept = dict(stream.clock) if backward != _OUTSIDE_OF_BACKWARD else None
        return _Access(stream, stream.clock.get(stream.id, 0), name, backward, kept)

    def _order(self, name: str, does: str, block: Block, before: _Access, stream: Stream, backward: int) -> None:
        if before.stream is stream or stream.clock.get(before.stream.id, 0) >= before.count:
            return
        if before.backward == backward != _OUTSIDE_OF_BACKWARD:
            assert before.clock is not None
            _merge(stream.clock, before.clock)  # autograd's engine records an event for the next node, which waits
            block.recorded.add(stream.id)
            return
        self._found.append(
            RaceError(
                f"{name} on {stream} {does} {block.what}, but no event orders it after {before.name} on {before.stream}"
            )
        )
        if backward == _OUTSIDE_OF_BACKWARD and not self.goes_on:
            self.check()

    def check(self) -> None:
        """Raise the first error that was found where none can be raised, since the last call.

        That is where memory is freed, and in a backward: there an error would end the process, as the engine's threads
        cannot pass errors of a device in Python on.
        """
        if self._found:
            found, self._found = self._found, []
            raise found[0]

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
                if stream is owner or stream.id in block.recorded:
                    continue
                if max(owner.clock.get(stream.id, 0), self.host.get(stream.id, 0)) < access.count:
                    reused = f"{block.what} was freed, and {owner} may reuse it"
                    self._found.append(
                        FreedTooEarlyError(f"{reused}, while {access.name} on {stream} may still use it")
                    )

    # --- the host -----------------------------------------------------------------------------------------------------

    def host_waits(self, clock: Clock, operation: str, until_ns: int = 0) -> None:
        """The host waits, which is counted; until a time of the monotonic clock, where kernels have times."""
        self._pass_until(until_ns)
        with self.lock:
            _merge(self.host, clock)
            self.syncs.append(HostSync(operation, _line_of_code()))

    def synchronize(self) -> None:
        """The host waits for all streams."""
        for stream in self.streams.values():
            self._pass_until(stream.free_ns)
            _merge(self.host, stream.clock)
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

    # --- autograd -----------------------------------------------------------------------------------------------------
    # A node of the backward runs on the stream of its forward, in a thread of the engine. Which one that was is known
    # by the node's sequence number: a forward's kernels come right after its node was made.

    def note_forward(self) -> None:
        """Before an operation outside of a backward: remember the stream of the node that was made for it."""
        node = torch._C._autograd._get_sequence_nr() - 1
        if node != self._last_node:
            self._last_node = node
            if self.current_stream is self.default:
                self._stream_of_node.pop(node, None)
            else:
                self._stream_of_node[node] = self.current_stream

    def stream_of_kernel(self) -> Stream:
        """Where a kernel goes: to the current stream, or in a backward to that of the node's forward."""
        backward = torch._C._current_graph_task_id()
        if backward == _OUTSIDE_OF_BACKWARD:
            return self.current_stream
        node = torch._C._current_autograd_node()
        stream = self._last_in_backward
        if node is not None:
            number = node._sequence_nr()
            stream = self._stream_of_node.get(number, self.default)
            if number == _ACCUMULATE_GRAD:
                stream = self.current_stream
        self._last_in_backward = stream
        self._join_backward(backward, stream)
        return stream

    def _join_backward(self, backward: int, stream: Stream) -> None:
        """The engine lets a backward's streams wait for the caller's stream, and at the end that one for them."""
        if backward not in self._backwards:
            self._backwards[backward] = set()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(backward))
        if stream not in self._backwards[backward]:
            self._backwards[backward].add(stream)
            _merge(stream.clock, self.current_stream.clock)

    def _end_backward(self, backward: int) -> None:
        with self.lock:
            for stream in self._backwards.pop(backward):
                _merge(self.current_stream.clock, stream.clock)


_thread = threading.local()


def current_device() -> SimDevice:
    """The device that is active in this thread; else the one that a kernel of this thread was last launched on."""
    device = getattr(_thread, "device", None) or getattr(_thread, "last", None)
    if device is None:
        raise RuntimeError("no simulated device is active in this thread: with SimDevice().active(): …")
    return device


def set_last_device(device: SimDevice) -> None:
    """Threads of autograd's engine have no active device: they go on with the last one."""
    _thread.last = device


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
