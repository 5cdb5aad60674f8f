"""How much of a device the kernels of a step may keep, so that it has room for all that can be there at once.

A kernel that waits for another rank keeps its CTAs, each a multiprocessor. If such kernels keep a whole device, it
starts nothing else, perhaps not what the other rank waits for: then the order in which it serves its streams decides
whether the step hangs. A stream has one kernel at a time. So

    kernels at once  ≤  slots, the streams of a rank
    slots × CTAs     ≤  multiprocessors      ⇒ no kernel ever waits for room, whatever the order of service
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from rota.core.errors import PlanError
from rota.core.placement import Placement
from rota.core.tasks import values_of

# What a CTA of NCCL moves on Ampere, by NCCL's own model (perChMaxRingLL128Bws); 36.7 GB/s on Hopper, 40 on Blackwell.
_CTA_BYTES_PER_US = 20_000


def num_slots(placement: Placement, tied: Iterable[tuple[int, ...]] = (), *, replicas: bool = True) -> int:
    """The most kernels that can be on one device at once, in any order of service: its streams, see `device_steps`.

    `tied`, `replicas`: as for `rota.core.programs.device_steps.device_programs`.
    """
    channels = {(route.sender, route.receiver) for route in placement.routes if not route.is_copy}
    sums = {tuple(sorted(ranks)) for ranks in tied}
    computing = {rank for task in placement.tasks for rank in task.ranks}
    trained = {rank for task in placement.tasks if task.kind.makes_weight_gradients for rank in task.ranks}
    return max(Counter(chain(*channels, *sums, computing, trained if replicas else ())).values())


class MostCtas(NamedTuple):
    """How many CTAs a kernel may have: `everywhere`, and between pairs of ranks whose link does not need as many."""

    everywhere: int
    between: Mapping[tuple[int, ...], int]

    def on(self, ranks: tuple[int, ...]) -> int:
        """For a communicator of these ranks; of a channel the sender, then the receiver."""
        return min(self.everywhere, self.between.get(ranks, self.everywhere))


def most_ctas(placement: Placement, slots: int, num_multiprocessors: int) -> MostCtas:
    """How many CTAs kernels may have on devices with so many multiprocessors, of which `slots` can be there at once.

    A channel gets no more than it takes to move its largest message as fast as its link.

    Raises:
        PlanError: There are fewer multiprocessors than slots (reason "device order").
    """
    everywhere = num_multiprocessors // slots
    if everywhere == 0:
        raise PlanError(
            f"up to {slots} kernels can be on a device at once, one per stream, but it has {num_multiprocessors} "
            f"multiprocessors: kernels that wait for other ranks could keep all of them. Let each rank exchange "
            f"messages with fewer others, or use larger devices",
            "device order",
        )
    between: dict[tuple[int, ...], int] = {}
    for route in placement.routes:
        pair = route.sender, route.receiver
        link, num_bytes = placement.cluster.link_between(*pair), max(values_of(route.num_bytes))
        if link.bytes_per_us is not None and num_bytes > 0:
            moving_us = link.transfer_us(num_bytes) - link.latency_us
            between[pair] = max(between.get(pair, 0), -(-num_bytes // (_CTA_BYTES_PER_US * moving_us)))
    return MostCtas(everywhere, between)
