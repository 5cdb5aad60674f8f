"""Messages between two queued devices, of many sizes, timed by the devices' events: no host waits between messages.

    one way      starter   ██ spin ██│ send 64 MB ─▶ receive 1 kB │ send 64 MB ─▶ …     round trips between its marks
                 other     ██ spin ██  receive 64 MB ─▶ send 1 kB …
    interval     sender    ██ spin ██  send send send send
                 receiver  ██ spin ██  receive │ receive │ receive │ receive            between its marks

A round trip of two small messages is twice a small one-way time; it gives the part of a small reply in the others.
Both hosts have enqueued all of it when the first device ends its spin, else it is measured again behind a longer one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.distributed as dist

from rota.cluster import Link
from rota.errors import PipelineError
from rota.profiling.link_fits import Line, line_through
from rota.profiling.spinning import Spinner
from rota.runtime.device.protocol import Mark, QueuedDevice
from rota.runtime.json_messages import all_gather_json
from rota.torch_internals import backend_of, message_options, move_message
from rota.units import size_text, time_text

SIZES = tuple(of * 10**power for power in (3, 6) for of in (1, 4, 16, 64, 256))  # 1 kB to 256 MB
_PART_OF_FREE = 4  # that the largest message may take
_NUM_SMALL, _FEW_BYTES = (
    20,
    4_000_000,
)  # messages up to this size are sent so often in a row, others as often as asked for
PACE_US = 1_000.0  # of the kernel before a paced message: as long as a short op
_LONGEST_US = 200_000.0  # of a message; larger ones are left out
_LONGEST_SPIN_US = 2_000_000.0
_FASTEST_BYTES_PER_US = 4_000_000  # 4 TB/s in one direction: more than any interconnect of two devices has
_TRIES = 3

Pair = tuple[int, int]


class LinkSample(NamedTuple):
    """Messages of one size in one direction, in µs: alone on the link, and from one to the next of many in a row.

    `paced_us`: a small one, alone and behind a kernel, in the mean of both directions; 0 where it was not measured.
    """

    num_bytes: int
    one_way_us: float
    interval_us: float
    paced_us: float = 0.0


class Side(Protocol):
    """One of two processes that measure the messages between their devices; both call the same in the same order."""

    def round_trip_us(self, there_bytes: int, back_bytes: int, count: int) -> float:
        """The fastest of `count` round trips, known to both sides."""

    def interval_us(self, num_bytes: int, count: int, *, there: bool) -> float:
        """The shortest time from one message to the next of `count` in a row, known to both sides."""

    def paced_us(self, num_bytes: int, count: int) -> float:
        """The median time of `count` messages of this size in both directions in turn, each behind a kernel."""


def measure_pairs(
    device: QueuedDevice, pairs: Sequence[Sequence[Pair]], repeats: int, spinner: Spinner | None = None
) -> dict[Pair, list[LinkSample]]:
    """Measure both directions of pairs of processes of the default group. Collective.

    Args:
        device: This process's.
        pairs: In rounds: the pairs of a round are measured at once, so no process is in two of them.
        repeats: Number of large messages; the fastest counts, as other load only makes them slower.
        spinner: Of this device; None: a new one.

    Returns:
        The samples of each direction, by sender and receiver, on all processes.

    Raises:
        PipelineError: Times cannot be, also when they are measured again.
    """
    mine, spinner = dist.get_rank(), spinner or Spinner(device)
    with host_group() as hosts:
        largest = min(all_gather_json(device.free_bytes(), hosts)) // _PART_OF_FREE
        sizes = [size for size in SIZES if size <= largest] or [*SIZES[:2]]
        found: dict[str, Any] = {}
        for of_round in pairs:
            for pair in of_round:
                group = dist.new_group([*pair], backend=device.backend)
                if mine in pair:
                    side = _DeviceSide(device, spinner, group, pair, hosts)
                    found |= {f"{a} {b}": of for (a, b), of in _samples_of_pair(side, pair, sizes, repeats).items()}
                    dist.destroy_process_group(group)
            dist.barrier(hosts)
        gathered = all_gather_json(found, hosts)
    return {
        (a, b): [LinkSample(*sample) for sample in gathered[a][f"{a} {b}"]]
        for of_round in pairs
        for pair in of_round
        for a, b in (pair, pair[::-1])
    }


@contextmanager
def host_group() -> Iterator[dist.ProcessGroup | None]:
    """A group for what the hosts agree on: the default one, unless it takes tensors of a device alone."""
    group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    try:
        yield group
    finally:
        if group is not None:
            dist.destroy_process_group(group)


# --- what is measured -------------------------------------------------------------------------------------------------


def _samples_of_pair(side: Side, pair: Pair, sizes: Sequence[int], repeats: int) -> dict[Pair, list[LinkSample]]:
    wrong = ""
    for _ in range(_TRIES):
        there, back = samples_of(side, sizes, repeats)
        wrong = implausible(there) or implausible(back)
        if not wrong:
            return {pair: there, pair[::-1]: back}
    raise PipelineError(
        f"the link between processes {pair[0]} and {pair[1]} cannot be measured: {wrong}, {_TRIES} times in a row; "
        f"end what else uses the devices, or check their driver"
    )


def samples_of(side: Side, sizes: Sequence[int], repeats: int) -> tuple[list[LinkSample], list[LinkSample]]:
    """Messages of each size, from the starter and to it; sizes that would take too long are left out."""
    small = sizes[0]
    small_us = side.round_trip_us(small, small, _NUM_SMALL) / 2
    paced_us = side.paced_us(small, _NUM_SMALL)
    there = [LinkSample(small, small_us, side.interval_us(small, _NUM_SMALL, there=True), paced_us)]
    back = [LinkSample(small, small_us, side.interval_us(small, _NUM_SMALL, there=False), paced_us)]
    for size in sizes[1:]:
        count = _NUM_SMALL if size <= _FEW_BYTES else repeats
        for of, is_there in ((there, True), (back, False)):
            round_trip_us = side.round_trip_us(*((size, small) if is_there else (small, size)), count)
            of.append(LinkSample(size, round_trip_us - small_us, side.interval_us(size, count + 1, there=is_there)))
        if 4 * max(there[-1].one_way_us, back[-1].one_way_us) > _LONGEST_US:  # the next ones are larger
            break
    return there, back


def implausible(samples: Sequence[LinkSample]) -> str:
    """What cannot be about these times, in words; "" if nothing."""
    for sample in samples:
        size = size_text(sample.num_bytes)
        for us, how in ((sample.one_way_us, "alone"), (sample.interval_us, "in a row")):
            if us <= 0:
                return f"{size} {how} took {us:.1f} µs"
            if sample.num_bytes / us > _FASTEST_BYTES_PER_US:
                return f"{size} {how} took {us:.1f} µs, more than {size_text(_FASTEST_BYTES_PER_US * 1_000_000)}/s"
    for smaller, larger in pairwise(samples):
        if larger.one_way_us < smaller.one_way_us / 2:
            return (
                f"{size_text(larger.num_bytes)} took {larger.one_way_us:.1f} µs, and {size_text(smaller.num_bytes)} "
                f"{smaller.one_way_us:.1f} µs"
            )
    return ""


def line_of(samples: Sequence[LinkSample]) -> Line:
    """The line that is nearest to the times of single messages, at a pipeline's pace.

    What a small message behind a kernel takes longer than directly after another one is added to all of them.
    """
    line = line_through([(sample.num_bytes, sample.one_way_us) for sample in samples])
    later_us = max((sample.paced_us - sample.one_way_us for sample in samples if sample.paced_us), default=0.0)
    return Line(line.us + max(later_us, 0.0), max(line.us_per_byte, 1 / _FASTEST_BYTES_PER_US))


def fitted(samples: Sequence[LinkSample]) -> Link:
    """The link whose times are nearest to those of single messages: the least squares of the relative errors."""
    line = line_of(samples)
    return Link(round(line.us), max(round(1 / line.us_per_byte), 1))


def samples_text(samples: Sequence[LinkSample]) -> str:
    """The times of single messages by size, and the rate of the largest ones, alone and in a row."""
    times = ", ".join(f"{size_text(s.num_bytes)} {time_text(round(s.one_way_us))}" for s in samples)
    alone, in_a_row = (
        f"{size_text(round(samples[-1].num_bytes / us * 1_000_000))}/s"
        for us in (samples[-1].one_way_us, samples[-1].interval_us)
    )
    paced = f"; {samples[0].paced_us:.0f} µs behind a kernel" if samples[0].paced_us else ""
    return f"{times}{paced} ({alone}; in a row {in_a_row})"


# --- how it is measured -----------------------------------------------------------------------------------------------


@final
class _DeviceSide:
    """See `Side`. Making it opens the channel, for which both hosts wait."""

    def __init__(
        self,
        device: QueuedDevice,
        spinner: Spinner,
        group: dist.ProcessGroup | None,
        pair: Pair,
        hosts: dist.ProcessGroup | None,
    ) -> None:
        assert group is not None
        mine = dist.get_rank()
        self._device, self._spinner, self._hosts = device, spinner, hosts
        self._starts, self._other = mine == pair[0], pair[mine == pair[0]]
        self._backend = backend_of(group, device.torch_device)
        first = int(pair[0] > pair[1])  # a group numbers its ranks in ascending order
        self._options = {True: message_options(first), False: message_options(1 - first)}
        self._message_us = 100.0  # what the host needs for one, at most so far
        for there in (True, False):
            self._message(torch.zeros(1, dtype=torch.uint8, device=device.torch_device), there=there)
        device.synchronize()

    def round_trip_us(self, there_bytes: int, back_bytes: int, count: int) -> float:
        """See `Side`."""
        there, back = self._buffer(there_bytes), self._buffer(back_bytes)

        def round_trip() -> None:
            self._message(there, there=True)
            self._message(back, there=False)

        return min(self._laps_us(round_trip, count, 2, marks=self._starts))

    def interval_us(self, num_bytes: int, count: int, *, there: bool) -> float:
        """See `Side`."""
        buffer = self._buffer(num_bytes)
        laps = self._laps_us(lambda: self._message(buffer, there=there), count, 1, marks=self._starts is not there)
        return min(laps[1:])  # the first one waits for the sender

    def paced_us(self, num_bytes: int, count: int) -> float:
        """See `Side`. What is left of a round trip, of which each half begins behind a kernel of its sender."""
        buffer, device = self._buffer(num_bytes), self._device
        pauses: list[tuple[Mark, Mark]] = []  # of the starter: its round trips

        def round_trip() -> None:
            if self._starts:
                self._spinner.spin(PACE_US)
                begun = device.mark()
                self._message(buffer, there=True)
                self._message(buffer, there=False)
            else:
                self._message(buffer, there=True)
                begun = device.mark()
                self._spinner.spin(PACE_US)
            pauses.append((begun, device.mark()))
            if not self._starts:
                self._message(buffer, there=False)

        self._laps_us(round_trip, count, 2, marks=False)
        times_ns = device.times_ns([mark for pause in pauses[-count:] for mark in pause])  # earlier ones were late
        mine, none = [(b - a) / 1000 for a, b in zip(times_ns[::2], times_ns[1::2], strict=True)], [0.0] * count
        both = self._largest([*mine, *none] if self._starts else [*none, *mine])
        return median((trip - pause) / 2 for trip, pause in zip(both[:count], both[count:], strict=True))

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device.torch_device)

    def _message(self, tensor: torch.Tensor, *, there: bool) -> None:
        move_message(self._backend, tensor, self._options[there])  # as the channels of a pipeline do

    def _laps_us(self, enqueue: Callable[[], None], count: int, num_messages: int, *, marks: bool) -> list[float]:
        """What each `enqueue` takes on the device of the side that `marks`, known to both."""
        device = self._device
        while True:
            (message_us,) = self._largest([self._message_us])
            head_start_us = 2 * message_us * count * num_messages
            device.begin()
            self._spinner.spin(head_start_us)
            found = [device.mark()]
            began_ns = time.perf_counter_ns()
            for _ in range(count):
                enqueue()
                found.append(device.mark())
            is_late = device.is_done(found[0])
            host_us = (time.perf_counter_ns() - began_ns) / 1000 / (count * num_messages)
            self._message_us = max(host_us, 2 * message_us) if is_late else message_us
            times_ns = device.times_ns(found)
            laps = [(end - start) / 1000 for start, end in pairwise(times_ns)]
            late, *laps = self._largest([float(is_late), *(laps if marks else [0.0] * count)])
            if not late:
                return laps
            if head_start_us > _LONGEST_SPIN_US:
                raise PipelineError(
                    f"processes {dist.get_rank()} and {self._other} cannot enqueue {count * num_messages} messages in "
                    f"{head_start_us / 1e6:.1f} s; give each process a core of its own"
                )

    def _largest(self, numbers: list[float]) -> list[float]:
        """The larger one of both sides' numbers, at each position."""
        mine, theirs = torch.tensor(numbers, dtype=torch.float64), torch.empty(len(numbers), dtype=torch.float64)
        for sends in (self._starts, not self._starts):
            if sends:
                dist.send(mine, self._other, self._hosts)
            else:
                dist.recv(theirs, self._other, self._hosts)
        found: list[float] = torch.maximum(mine, theirs).tolist()
        return found
