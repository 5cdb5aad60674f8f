"""How fast two processes reach each other: by messages there and back."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from rota.costs import Link
from rota.errors import PipelineError

_BIG_BYTES = 4_000_000


def measure_link(sender: int, receiver: int, repeats: int = 7) -> Link:
    """The link between two processes of the default group, with nothing else on it. Collective; the same on all.

    Latency is half of a one-byte message's way there and back, the rate that of 4 MB; the fastest of `repeats` counts,
    as whatever else goes on only makes them slower.
    """
    size, mine = dist.get_world_size(), dist.get_rank()
    if sender == receiver or not {sender, receiver} <= {*range(size)}:
        raise PipelineError(f"no link from process {sender} to {receiver}; give two different ones of 0 to {size - 1}")
    told: list[Any] = [None]
    if mine in (sender, receiver):
        peer = receiver if mine == sender else sender
        small, big = (_one_way_us(peer, mine == sender, num_bytes, repeats) for num_bytes in (1, _BIG_BYTES))
        told = [link_of(small, big)]
    dist.broadcast_object_list(told, src=sender)
    link: Link = told[0]
    return link


def link_of(small_us: float, big_us: float, big_bytes: int = _BIG_BYTES) -> Link:
    """The link on which one byte takes `small_us`, and `big_bytes` take `big_us`."""
    return Link(round(small_us), max(round(big_bytes / max(big_us - small_us, 1)), 1))


def _one_way_us(peer: int, starts: bool, num_bytes: int, repeats: int) -> float:
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    times = []
    for _ in range(1 + repeats):  # the first one makes the connection
        start = time.perf_counter_ns()
        if starts:
            dist.send(message, peer)
        dist.recv(message, peer)
        if not starts:
            dist.send(message, peer)
        times.append(time.perf_counter_ns() - start)
    return min(times[1:]) / 2000
