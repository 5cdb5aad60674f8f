"""Devices with streams, events and NCCL-like messages, on which a wrong order hangs: without torch, without a GPU.

- A stream runs its kernels in order. A wait holds a stream until the event is recorded.
- A send ends when its receive takes the message, or when it fits into the channel's buffer. Messages keep their order.
- A collective ends when all its ranks are in it.
- A serial device starts a kernel only when all kernels that were launched before it have ended.
- A host that has launched too much waits.

Each rank's host is a thread. All state changes happen at once, under one lock, so a hang is found exactly: every host
waits, and no kernel can go on. No time passes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from rota.programs.device_steps import DeviceProgram, Step
from rota.tasks import Transfer


class HangError(Exception):
    """No kernel can go on. The message names the first kernel of each stream that has not ended."""


class WrongMessageError(Exception):
    """A receive got another message than the one that it was enqueued for."""


@dataclass(eq=False)
class Event:
    """Done when its stream gets to it."""

    name: str = ""
    is_done: bool = False


@dataclass(eq=False)
class Kernel:
    """What a stream runs. `can_end` is asked again and again from its start until it says yes."""

    name: str
    can_end: Callable[[], bool]
    on_start: Callable[[], None]
    waits_for: str
    has_started: bool = False


@dataclass(eq=False)
class _Record:
    event: Event


@dataclass(eq=False)
class _Wait:
    event: Event


@dataclass(eq=False)
class _Sent:
    payload: object
    num_bytes: int
    is_taken: bool = False


@dataclass
class _Pipe:
    """Messages of one direction of a communicator whose send has started."""

    waiting: deque[_Sent] = field(default_factory=deque)

    def fits(self, sent: _Sent, buffer_bytes: int) -> bool:
        """Whether all of `sent`, and what is before it, is in the buffer."""
        total = 0
        for each in self.waiting:
            total += each.num_bytes
            if each is sent:
                break
        return total <= buffer_bytes


class World:
    """All devices. `buffer_bytes`: of each direction of a channel; 0: each send waits for its receive."""

    def __init__(
        self, num_ranks: int, *, serial: bool = False, buffer_bytes: int = 0, queue_length: int = 10**9
    ) -> None:
        self.serial, self.buffer_bytes, self.queue_length = serial, buffer_bytes, queue_length
        self.devices = [Device(self, rank) for rank in range(num_ranks)]
        self.changed = threading.Condition()
        self._num_hosts = num_ranks  # that have not left
        self._waiting: list[Callable[[], bool]] = []  # what each host that waits waits for
        self._hang: str | None = None
        self._pipes: dict[Hashable, _Pipe] = {}
        self._arrived: dict[Hashable, set[int]] = {}

    def leave(self) -> None:
        """A host has ended: each calls this once."""
        with self.changed:
            self._num_hosts -= 1
            self._look_for_hang()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """With the lock. Raises HangError when it cannot happen any more."""
        if ready():
            return
        self._waiting.append(ready)
        self._look_for_hang()
        while not ready() and self._hang is None:
            self.changed.wait()
        self._waiting.remove(ready)
        if self._hang is not None:
            raise HangError(self._hang)

    def _look_for_hang(self) -> None:
        """All kernels that can go on have done so: each change lets them."""
        if self._hang is None and 0 < self._num_hosts == len(self._waiting) and not any(r() for r in self._waiting):
            self._hang = "; ".join(line for device in self.devices for line in device.unfinished())
            self.changed.notify_all()

    def go_on(self) -> None:
        """With the lock: run what can run, until nothing can."""
        while sum(device.advance() for device in self.devices):
            pass
        self.changed.notify_all()

    def pipe(self, key: Hashable) -> _Pipe:
        """The messages under way in one direction of a communicator."""
        return self._pipes.setdefault(key, _Pipe())

    def arrived(self, key: Hashable) -> set[int]:
        """The ranks that are in a collective."""
        return self._arrived.setdefault(key, set())


class Device:
    """One rank's device. Its methods are called by its host's thread."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self._streams: dict[str, deque[Kernel | _Record | _Wait]] = {}
        self._launched: deque[Kernel] = deque()  # and not ended
        self._num_collectives: dict[Hashable, int] = {}
        self._num_changes = 0  # starts and ends of entries
        #: (expected, received) where they differ.
        self.wrong: list[tuple[object, object]] = []

    # --- what a host calls --------------------------------------------------------------------------------------------

    def compute(self, stream: str, name: str) -> None:
        """A kernel that waits for nobody."""
        self._launch(stream, Kernel(name, lambda: True, lambda: None, ""))

    def send(self, stream: str, communicator: Hashable, receiver: int, payload: object, num_bytes: int = 1) -> None:
        """A kernel that sends `payload`."""
        world, pipe = self.world, self.world.pipe((communicator, self.rank, receiver))
        sent = _Sent(payload, num_bytes)
        self._launch(
            stream,
            Kernel(
                f"send {payload}",
                lambda: sent.is_taken or pipe.fits(sent, world.buffer_bytes),
                lambda: pipe.waiting.append(sent),
                f"a receive on rank {receiver}",
            ),
        )

    def receive(self, stream: str, communicator: Hashable, sender: int, expected: object) -> None:
        """A kernel that takes the next message, whatever it is."""
        pipe = self.world.pipe((communicator, sender, self.rank))

        def take() -> bool:
            if not pipe.waiting:
                return False
            sent = pipe.waiting.popleft()
            sent.is_taken = True
            if sent.payload != expected:
                self.wrong.append((expected, sent.payload))
            return True

        self._launch(stream, Kernel(f"receive {expected}", take, lambda: None, f"a send on rank {sender}"))

    def collective(self, stream: str, communicator: Hashable, ranks: Sequence[int], name: str) -> None:
        """A kernel of all `ranks`."""
        k = self._num_collectives[communicator] = self._num_collectives.get(communicator, 0) + 1
        arrived = self.world.arrived((communicator, k))
        others = ", ".join(str(rank) for rank in ranks if rank != self.rank)
        self._launch(
            stream, Kernel(name, lambda: len(arrived) == len(ranks), lambda: arrived.add(self.rank), f"ranks {others}")
        )

    def record(self, stream: str, name: str = "") -> Event:
        """An event behind what the stream has got so far."""
        event = Event(name)
        self._enqueue(stream, _Record(event))
        return event

    def wait(self, stream: str, event: Event) -> None:
        """Hold what the stream gets from now on until the event is done."""
        self._enqueue(stream, _Wait(event))

    def synchronize(self) -> None:
        """Wait until all streams are empty. Raises HangError."""
        with self.world.changed:
            self.world.wait_until(lambda: not any(self._streams.values()))

    # --- what the device does -----------------------------------------------------------------------------------------

    def _launch(self, stream: str, kernel: Kernel) -> None:
        with self.world.changed:
            self.world.wait_until(lambda: len(self._launched) < self.world.queue_length)
            self._launched.append(kernel)
            self._add(stream, kernel)

    def _enqueue(self, stream: str, entry: _Record | _Wait) -> None:
        with self.world.changed:
            self._add(stream, entry)

    def _add(self, stream: str, entry: Kernel | _Record | _Wait) -> None:
        queue = self._streams.setdefault(stream, deque())
        queue.append(entry)
        if len(queue) == 1:
            self.world.go_on()

    def advance(self) -> bool:
        """Let each stream go on as far as it can; whether any kernel started or anything ended."""
        before = self._num_changes
        for queue in self._streams.values():
            while queue and self._is_over(queue[0]):
                queue.popleft()
                self._num_changes += 1
        return self._num_changes > before

    def _is_over(self, entry: Kernel | _Record | _Wait) -> bool:
        """Whether the first entry of a stream is over; a kernel is started if it can be."""
        if isinstance(entry, _Wait):
            return entry.event.is_done
        if isinstance(entry, _Record):
            entry.event.is_done = True
            return True
        if not entry.has_started:
            if self.world.serial and self._launched[0] is not entry:
                return False
            entry.has_started = True
            self._num_changes += 1
            entry.on_start()
        if not entry.can_end():
            return False
        self._launched.remove(entry)
        return True

    def unfinished(self) -> Iterator[str]:
        """The first entry of each stream that is not over, as a watchdog reports it."""
        for stream, queue in self._streams.items():
            if not queue:
                continue
            entry = queue[0]
            if isinstance(entry, Kernel):
                if entry.has_started:
                    yield f"rank {self.rank}: {entry.name} on {stream} waits for {entry.waits_for}"
                else:
                    yield f"rank {self.rank}: {entry.name} on {stream} waits for {self._launched[0].name}"
            else:
                yield f"rank {self.rank}: {stream} waits for {entry.event.name}"


# --- a step of a plan -------------------------------------------------------------------------------------------------


def run(
    programs: Sequence[DeviceProgram], *, serial: bool = False, buffer_bytes: int = 0, queue_length: int = 10**9
) -> None:
    """Run what all ranks enqueue in a step. Raises HangError or WrongMessageError."""
    world = World(len(programs), serial=serial, buffer_bytes=buffer_bytes, queue_length=queue_length)
    errors: list[BaseException] = []

    def host(program: DeviceProgram) -> None:
        try:
            enqueue(world.devices[program.rank], program)
            world.devices[program.rank].synchronize()
        except BaseException as error:
            errors.append(error)
        finally:
            world.leave()

    threads = [threading.Thread(target=host, args=(program,), daemon=True) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
        assert not thread.is_alive(), "the fake itself hangs"
    for error in errors:
        raise error
    for device in world.devices:
        for expected, got in device.wrong:
            raise WrongMessageError(f"rank {device.rank} received {got} instead of {expected}")


def enqueue(device: Device, program: DeviceProgram) -> None:
    """Give a device all steps of its rank, as the runtime does."""
    awaited = program.awaited
    events: dict[int, Event] = {}
    for i, step in enumerate(program.steps):
        for before in step.waits:
            device.wait(step.stream, events[before])
        if step.has_kernel:
            _launch(device, step)
        if i in awaited:
            events[i] = device.record(step.stream, str(step))


def _launch(device: Device, step: Step) -> None:
    if step.communicator is None:
        device.compute(step.stream, str(step))
    elif not isinstance(step.subject, Transfer):
        device.collective(step.stream, step.communicator, step.communicator.ranks, str(step))
    elif step.what == "send":
        transfer = step.subject
        device.send(step.stream, step.communicator, transfer.receiver, transfer, max(transfer.num_bytes, 1))
    else:
        device.receive(step.stream, step.communicator, step.subject.sender, step.subject)
