"""What messages between queued devices share, and what they cost kernels beside them: all ranks, by `Neighbours`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist

from rota.cluster import SharedLink
from rota.profiling.device_contention import Neighbours, median_of
from rota.profiling.device_links import host_group
from rota.profiling.host_links import host_name
from rota.profiling.link_fits import Line, line_through, rate_of_rounds, sample_of
from rota.profiling.spinning import Spinner
from rota.runtime.device.protocol import QueuedDevice
from rota.runtime.json_messages import all_gather_json
from rota.units import size_text

_SIZES = (64_000, 16_000_000)  # fewer bytes where less memory is free
_PART_OF_FREE = 32  # a rank has up to four messages under way, and more that are being freed
_IN_A_ROW = 8
_NOISE_US = 2.0  # of what a message costs: the least that can be told from noise


class Beside(NamedTuple):
    """What hosts share, what a message costs its sender and its receiver, and this in words."""

    shared: tuple[SharedLink, ...]
    send: Line
    receive: Line
    notes: list[str]


def measure_beside(device: QueuedDevice, spinner: Spinner, repeats: int) -> Beside:
    """Measure messages of neighbours at once, and how much longer products take beside messages. Collective.

    Ranks are neighbours on their host, in ascending order. The rates of what hosts share are those beside the costs.
    """
    with host_group() as hosts:
        names = all_gather_json(host_name(), hosts)
        of_host = {name: [rank for rank, of in enumerate(names) if of == name] for name in names}
        pairs = [pair for ranks in of_host.values() for pair in pairwise(ranks)]
        largest = max(min(all_gather_json(device.free_bytes(), hosts)) // _PART_OF_FREE, 1)
        sizes = sorted({min(size, largest) for size in _SIZES})
        neighbours = Neighbours(device, spinner, pairs, hosts)
        try:
            mine = _measured(neighbours, of_host.values(), sizes, repeats)
            told = all_gather_json(mine, hosts)
        finally:
            neighbours.close()
    send, receive = (
        line_through([(size, max(us, 0.0)) for of in told for size, us in of[role]] or [(1, 0.0)], _NOISE_US)
        for role in ("send", "receive")
    )
    both = Line(send.us + receive.us, send.us_per_byte + receive.us_per_byte)
    shared = []
    for name, ranks in of_host.items():
        if len(ranks) > 1:
            slowest = [max(told[rank]["rounds"][i] for rank in ranks) for i in range(len(sizes))]
            samples = [sample_of(size, [us]) for size, us in zip(sizes, slowest, strict=True)]
            rate = rate_of_rounds(samples[-1:], 2 * (len(ranks) - 1), min(len(ranks) - 1, 2), both)
            shared.append(SharedLink(f"host {name.split()[0]}", max(round(rate), 1), tuple(ranks), tuple(ranks)))
    launch_us = max(of["launch"] for of in told)
    return Beside(tuple(shared), send, receive, _notes(shared, sizes[-1], send, receive, launch_us))


def _measured(
    neighbours: Neighbours, ranks_of_hosts: Iterable[Sequence[int]], sizes: Sequence[int], repeats: int
) -> dict[str, Any]:
    """What this rank has measured: rounds by size, (size, µs) of messages that it sends or receives, and its host."""
    mine = dist.get_rank()
    found: dict[str, Any] = {"send": [], "receive": []}
    found["rounds"] = [median_of(partial(neighbours.round_us, size, _IN_A_ROW), repeats) for size in sizes]
    apart = [pair for ranks in ranks_of_hosts for pair in zip(ranks[::2], ranks[1::2], strict=False)]
    for pairs in (apart, [pair[::-1] for pair in apart]):  # no rank is in two of them
        for size in sizes:
            us = median_of(partial(neighbours.cost_us, pairs, size, _IN_A_ROW), repeats)
            for role, ranks in zip(("send", "receive"), zip(*pairs, strict=True), strict=False):
                if mine in ranks:
                    found[role].append((size, us))
    return found | {"launch": neighbours.launch_us()}


def _notes(shared: Sequence[SharedLink], size: int, send: Line, receive: Line, launch_us: float) -> list[str]:
    costs = " and ".join(
        f"{line.at(size):.0f} µs {where}" for line, where in ((send, "at its sender"), (receive, "at its receiver"))
    )
    return [
        *(f"{of.name}: {size_text(of.bytes_per_us * 1_000_000)}/s between all neighbours at once" for of in shared),
        f"{size_text(size)} take a matrix product beside them {costs}",
        f"the host needs {launch_us:.0f} µs to launch a kernel: ops with shorter kernels wait for it",
    ]
