"""Messages of a queued device beside others and beside kernels, by events: as in a pipeline, and not alone.

    neighbours   compute  ██ spin ██│                                  rounds: each channel's last mark
                 0→1                └▶ send send send send │           channels are streams and groups of their own, as
                 1→0                └▶ receive receive …   │           those of `rota.runtime.channels`
    kernels      compute  ██ spin ██│ product product product product │
                 0→1                └▶ send send …                     how much later the last product ends for them

All hosts have enqueued everything when the first device ends its spin, else it is done again behind a longer one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from rota.errors import PipelineError
from rota.profiling.spinning import Spinner
from rota.runtime.device.protocol import Mark, QueuedDevice
from rota.runtime.json_messages import all_gather_json
from rota.torch_internals import backend_of, message_options, move_message

Pair = tuple[int, int]

_FIRST_SPIN_US, _LONGEST_SPIN_US = 2_000.0, 2_000_000.0
_WIDTH = 1024  # of a matrix product, which keeps all of a device's units busy
_PRODUCTS = 16  # to know how long one takes
_MOST_PRODUCTS = 1024
_MORE = 1.2  # by how much products last longer than the messages beside them


class Channel(NamedTuple):
    """One direction between two neighbours: a stream and a process group."""

    pair: Pair
    backend: Any
    options: Any
    stream: Any


@final
class Neighbours:
    """This rank's channels to the ranks next to it. Making it is collective, and opens the channels.

    `pairs`: neighbours of all ranks, the same on each, the lower rank first. `hosts`: for what the hosts agree on.
    """

    def __init__(
        self, device: QueuedDevice, spinner: Spinner, pairs: Sequence[Pair], hosts: dist.ProcessGroup | None
    ) -> None:
        self._device, self._spinner, self._hosts = device, spinner, hosts
        self._spin_us, mine = _FIRST_SPIN_US, dist.get_rank()
        self._groups: list[Any] = []
        self.channels: list[Channel] = []
        for pair in sorted([*pairs, *((b, a) for a, b in pairs)]):
            group = dist.new_group(sorted(pair), backend=device.backend)
            if mine not in pair:
                continue
            self._groups.append(group)
            options = message_options(int(pair[0] > pair[1]))  # a group numbers its ranks in ascending order
            channel = Channel(
                pair, backend_of(group, device.torch_device), options, device.stream("→".join(map(str, pair)))
            )
            move_message(channel.backend, torch.zeros(1, device=device.torch_device), options)
            device.synchronize()
            self.channels.append(channel)

    def close(self) -> None:
        """Release the process groups."""
        self.channels.clear()
        for group in self._groups:
            dist.destroy_process_group(group)

    def round_us(self, num_bytes: int, count: int) -> float:
        """Time of a round with a message on each channel of all ranks, as one of `count` in a row. Collective."""
        ends_us = self._timed(lambda start: self._messages(start, self.channels, num_bytes, count))
        return max(ends_us, default=0.0) / count

    def cost_us(self, pairs: Sequence[Pair], num_bytes: int, count: int) -> float:
        """How much longer this rank's products take for each message of the channels `pairs`. Collective.

        May be negative, by chance. 0 on a rank that neither sends nor gets one.
        """
        own = [channel for channel in self.channels if channel.pair in pairs]
        ends_us = self._timed(lambda start: self._messages(start, own, num_bytes, count))
        products_us = max(self._timed(lambda _: self._products(_PRODUCTS)))
        longest_us = max(all_gather_json(max(ends_us, default=0.0), self._hosts))
        number = round(_MORE * longest_us * _PRODUCTS / max(products_us, 1.0))
        number = min(max(number, _PRODUCTS), _MOST_PRODUCTS)
        alone_us = max(self._timed(lambda _: self._products(number)))
        both = self._timed(lambda start: [*self._products(number), *self._messages(start, own, num_bytes, count)])
        return (both[0] - alone_us) / (count * len(own)) if own else 0.0

    def _messages(self, start: Mark, channels: Sequence[Channel], num_bytes: int, count: int) -> list[Mark]:
        device = self._device
        buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device) for _ in channels]
        ready = device.record(device.current())
        for channel in channels:
            device.wait(channel.stream, start)
            device.wait(channel.stream, ready)
        for _ in range(count):
            for channel, buffer in zip(channels, buffers, strict=True):
                with device.use(channel.stream):
                    move_message(channel.backend, buffer, channel.options)
        ends = [device.mark_on(channel.stream) for channel in channels]
        for end in ends:
            device.wait(device.current(), end)  # the buffers are freed on this stream
        return ends

    def _products(self, count: int) -> list[Mark]:
        where = self._device.torch_device
        matrix, out = torch.zeros(_WIDTH, _WIDTH, device=where), torch.empty(_WIDTH, _WIDTH, device=where)
        for _ in range(count):
            torch.mm(matrix, matrix, out=out)
        return [self._device.mark()]

    def launch_us(self) -> float:
        """What the host needs to enqueue a kernel. Collective, as its device is to be busy meanwhile."""
        found: list[float] = []

        def enqueue(_: Mark) -> list[Mark]:
            begun_ns = time.perf_counter_ns()
            marks = self._products(_PRODUCTS)
            found.append((time.perf_counter_ns() - begun_ns) / 1000 / _PRODUCTS)
            return marks

        self._timed(enqueue)
        return found[-1]

    def _timed(self, enqueue: Callable[[Mark], list[Mark]]) -> list[float]:
        """When the device reaches the marks that are enqueued, in µs after the end of its spin. Collective."""
        device = self._device
        while True:
            device.begin()
            dist.barrier(self._hosts)
            self._spinner.spin(self._spin_us)
            start, began_ns = device.mark(), time.perf_counter_ns()
            marks = enqueue(start)
            is_late, host_us = device.is_done(start), (time.perf_counter_ns() - began_ns) / 1000
            start_ns, *times_ns = device.times_ns([start, *marks])
            others = all_gather_json([is_late, host_us], self._hosts)
            if not any(late for late, _ in others):
                return [(time_ns - start_ns) / 1000 for time_ns in times_ns]
            if self._spin_us > _LONGEST_SPIN_US:
                raise PipelineError(
                    f"rank {dist.get_rank()} cannot enqueue its messages in {self._spin_us / 1e6:.1f} s; give each "
                    f"process a core of its own"
                )
            self._spin_us = 2 * max(self._spin_us, *(of_host_us for _, of_host_us in others))


def median_of(measure: Callable[[], float], repeats: int) -> float:
    """The median of repeated measurements, after one to warm up."""
    measure()
    return median(measure() for _ in range(repeats))
