"""Devices with streams, events and NCCL-like messages, on which a wrong order hangs: without torch, without a GPU.

- A stream runs its steps in order, each once the steps that it waits for are over.
- A send ends when a receive takes its message, which need not be the one that the receive expects. Messages keep their
  order.
- A collective ends when all its ranks are in it.
- A serial device starts a kernel only when all kernels that were launched before it have ended.
- A host that has launched too much waits.

Nothing takes time: all go on as far as they can, and what is left then hangs.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence

from rota.core.programs.device_steps import DeviceProgram
from rota.core.tasks import Transfer


class HangError(Exception):
    """No kernel can go on. The message names the first step of each stream that is not over."""


class WrongMessageError(Exception):
    """A receive got another message than the one that it was enqueued for."""


def run(programs: Sequence[DeviceProgram], *, serial: bool = False, queue_length: int = 10**9) -> None:
    """Run what all ranks enqueue in a step. Raises HangError or WrongMessageError."""
    world = _World(serial, queue_length)
    devices = [_Device(program, world) for program in programs]
    while sum(device.go_on() for device in devices):
        pass
    if left := [name for device in devices for name in device.unfinished()]:
        raise HangError("; ".join(left))
    if world.wrong:
        raise WrongMessageError(world.wrong[0])


def finishes(programs: Sequence[DeviceProgram], serial: bool) -> bool:
    """Whether all ranks get to their end, with the right messages."""
    try:
        run(programs, serial=serial)
    except (HangError, WrongMessageError):
        return False
    return True


class _World:
    """What devices share: messages under way, in each direction of a communicator, and who is in each collective."""

    def __init__(self, serial: bool, queue_length: int) -> None:
        self.serial, self.queue_length = serial, queue_length
        self.messages: defaultdict[Hashable, deque[tuple[_Device, int]]] = defaultdict(deque)
        self.arrived: defaultdict[Hashable, set[int]] = defaultdict(set)
        self.wrong: list[str] = []


class _Device:
    """One rank's device and its host; steps by their positions in the program."""

    def __init__(self, program: DeviceProgram, world: _World) -> None:
        self.rank, self.steps, self.world = program.rank, program.steps, world
        self.num_enqueued = 0
        self.streams: defaultdict[str, deque[int]] = defaultdict(deque)  # of what is enqueued and not over
        self.launched: deque[int] = deque()  # kernels that have not ended
        self.started: set[int] = set()
        self.taken: set[int] = set()  # sends whose messages were taken
        self.over: set[int] = set()
        counts: Counter[Hashable] = Counter()  # of collectives, which meet by their number
        self.collectives: dict[int, Hashable] = {}
        for i, step in enumerate(self.steps):
            if step.communicator is not None and not isinstance(step.subject, Transfer):
                counts[step.communicator] += 1
                self.collectives[i] = step.communicator, counts[step.communicator]

    def go_on(self) -> bool:
        """Enqueue, start and end what can be; whether anything was."""
        before = self.num_enqueued, len(self.started), len(self.over)
        while self.num_enqueued < len(self.steps):
            step = self.steps[self.num_enqueued]
            if step.has_kernel:
                if len(self.launched) >= self.world.queue_length:
                    break
                self.launched.append(self.num_enqueued)
            self.streams[step.stream].append(self.num_enqueued)
            self.num_enqueued += 1
        for stream in self.streams.values():
            while stream and self._is_over(stream[0]):
                self.over.add(stream.popleft())
        return before != (self.num_enqueued, len(self.started), len(self.over))

    def unfinished(self) -> list[str]:
        return [f"rank {self.rank}: {self.steps[stream[0]]}" for stream in self.streams.values() if stream]

    def _is_over(self, i: int) -> bool:
        """Whether the first step of a stream is over; a kernel is started if it can be."""
        if not self.over.issuperset(self.steps[i].waits):
            return False
        if not self.steps[i].has_kernel:
            return True
        if i not in self.started:
            if self.world.serial and self.launched[0] != i:
                return False
            self._start(i)
        if not self._has_ended(i):
            return False
        self.launched.remove(i)
        return True

    def _start(self, i: int) -> None:
        step = self.steps[i]
        self.started.add(i)
        if i in self.collectives:
            self.world.arrived[self.collectives[i]].add(self.rank)
        elif step.what == "send":
            self.world.messages[step.communicator, step.subject.receiver].append((self, i))

    def _has_ended(self, i: int) -> bool:
        step = self.steps[i]
        if step.communicator is None:
            return True
        if i in self.collectives:
            return len(self.world.arrived[self.collectives[i]]) == len(step.communicator.ranks)
        if step.what == "send":
            return i in self.taken
        messages = self.world.messages[step.communicator, self.rank]
        if not messages:
            return False
        sender, sent = messages.popleft()
        sender.taken.add(sent)
        if sender.steps[sent].subject != step.subject:
            self.world.wrong.append(f"rank {self.rank} received {sender.steps[sent].subject} as {step.subject}")
        return True
