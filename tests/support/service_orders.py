"""Every order in which devices with few places for kernels can serve their streams: without torch, without a GPU.

A kernel takes a place when it starts, and keeps it until it ends; one that meets others ends only after all of them
have started. A device starts any kernel that is first on its stream and waits for nothing, if it has a place left.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rota.core.programs.device_steps import DeviceProgram, Step
from support.device_clock import nodes_of

#: By stream of any rank: how many of its steps have ended, and whether the next one has started.
State = tuple[tuple[int, bool], ...]


class Explored(NamedTuple):
    """`hangs`: whether an order ends with steps left. `most_at_once`: the most kernels on a device in any order."""

    hangs: bool
    most_at_once: int


class _Stream(NamedTuple):
    rank: int
    steps: list[int]


def explore(programs: Sequence[DeviceProgram], num_slots: int) -> Explored:
    """What can happen with this many places on each device, in all orders."""
    orders = _Orders(programs, num_slots)
    start: State = ((0, False),) * len(orders.streams)
    seen, left = {start}, [start]
    hangs, most_at_once = False, 0
    while left:
        state = left.pop()
        most_at_once = max(most_at_once, *orders.num_running(state))
        following = [*orders.following(state)]
        hangs |= not following and any(
            ended < len(s.steps) for (ended, _), s in zip(state, orders.streams, strict=True)
        )
        new = [after for after in following if after not in seen]
        seen.update(new)
        left += new
    return Explored(hangs, most_at_once)


class _Orders:
    def __init__(self, programs: Sequence[DeviceProgram], num_slots: int) -> None:
        self.programs, self.num_slots = programs, num_slots
        self.streams = [
            _Stream(p.rank, [i for i, step in enumerate(p.steps) if step.stream == name])
            for p in programs
            for name in dict.fromkeys(step.stream for step in p.steps)
        ]
        places = ((k, n) for k, stream in enumerate(self.streams) for n in range(len(stream.steps)))
        self.place = {(self.streams[k].rank, self.streams[k].steps[n]): (k, n) for k, n in places}
        nodes = nodes_of(programs)
        self.parts: dict[object, list[tuple[int, int]]] = {}  # by node: stream and number of each step
        self.node = {}
        for (rank, i), place in self.place.items():
            self.node[place] = nodes[rank][i]
            self.parts.setdefault(nodes[rank][i], []).append(place)

    def step(self, k: int, n: int) -> Step:
        return self.programs[self.streams[k].rank].steps[self.streams[k].steps[n]]

    def num_running(self, state: State) -> list[int]:
        running = [0] * len(self.programs)
        for (_, started), stream in zip(state, self.streams, strict=True):
            running[stream.rank] += started
        return running

    def following(self, state: State) -> Iterator[State]:
        """The states after one more kernel has started or ended. What is no kernel takes no time."""
        running = self.num_running(state)
        for k, (n, started) in enumerate(state):
            stream = self.streams[k]
            if n == len(stream.steps):
                continue
            step = self.step(k, n)
            if started:
                if all(state[other][0] > m or state[other] == (m, True) for other, m in self.parts[self.node[k, n]]):
                    yield (*state[:k], (n + 1, False), *state[k + 1 :])
            elif all(state[j][0] > m for j, m in (self.place[stream.rank, before] for before in step.waits)):
                if not step.has_kernel:
                    yield (*state[:k], (n + 1, False), *state[k + 1 :])
                elif running[stream.rank] < self.num_slots:
                    yield (*state[:k], (n, True), *state[k + 1 :])
