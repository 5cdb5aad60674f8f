"""What ranks measure together: messages between each pair, and how far their clocks are apart. All is collective."""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rota.profiling.links import one_way_us
from rota.runtime.clocks import answer_offset, ask_offset_ns, clock_offset_ns
from rota.runtime.json_messages import all_gather_json

_REPEATS = 7
_MOST_PAIRS = 120  # of 16 ranks; each takes about a tenth of a second
_ECHO_BYTES = 1 << 20  # of random content, sent there and back
_CLOCK_SAMPLES, _BETWEEN_SAMPLES_S, _CLOCK_ROUNDS = 5, 0.2, 20


def own_device(kind: str) -> torch.device:
    """This rank's device, as `rota run` gives it: by LOCAL_RANK. It becomes the current one."""
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def ranks(device: torch.device) -> list[dict[str, Any]]:
    """What each rank is: its machine, device and versions."""
    here = {
        "host": socket.gethostname(),
        "device": str(device),
        "name": "" if device.type == "cpu" else getattr(torch, device.type).get_device_name(device),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    return all_gather_json(here)


def num_open_files() -> int:
    """How many files and sockets this process has open; 0 if that is unknown."""
    folder = Path("/proc/self/fd")
    return len([*folder.iterdir()]) if folder.exists() else 0


# --- links ------------------------------------------------------------------------------------------------------------


def links(device: torch.device, sizes: Sequence[int], ended: Callable[[str], None]) -> list[dict[str, Any]]:
    """The messages between each pair of ranks, one pair at a time, with the backend that a run on `device` uses.

    Args:
        device: This rank's.
        sizes: Bytes of the messages.
        ended: Called with the name of each pair that was measured.

    Returns:
        On all ranks, for each pair: its `ranks`, the `backend`, the `one_way_ns` of each of the `message_bytes`, and
        whether random content came back `intact`.
    """
    backend = dist.get_default_backend_for_device(device)
    mine: dict[str, Any] = {}
    pairs = pairs_of(dist.get_world_size())
    for a, b in pairs:
        with _pair_group(a, b, backend) as group:
            if dist.get_rank() in (a, b):
                mine[f"{a}-{b}"] = _pair(a, b, device, sizes, group)
        dist.barrier()  # of the default group, on the host: the next pair has the machine to itself
        ended(f"{a}-{b}")
    of_ranks = all_gather_json(mine)
    found = []
    for a, b in pairs:
        starter, other = of_ranks[a][f"{a}-{b}"], of_ranks[b][f"{a}-{b}"]
        of_pair = {"ranks": [a, b], "backend": backend, "message_bytes": [*sizes]}
        found.append({**of_pair, **starter, "intact": starter["intact"] and other["intact"]})
    return found


def pairs_of(num_ranks: int) -> list[tuple[int, int]]:
    """The pairs to measure: all of them, or only neighbours, which are what pipelines use, where they are too many."""
    pairs = [*combinations(range(num_ranks), 2)]
    if len(pairs) <= _MOST_PAIRS:
        return pairs
    return [(rank, rank + 1) for rank in range(num_ranks - 1)] + [(0, num_ranks - 1)]


@contextmanager
def _pair_group(a: int, b: int, backend: str) -> Iterator[dist.ProcessGroup | None]:
    """A group of these two ranks, as a run has one per pair of neighbours. Every rank calls it."""
    group = dist.new_group([a, b], backend=backend)
    try:
        yield group
    finally:
        if dist.get_rank() in (a, b):
            dist.destroy_process_group(group)


def _pair(
    a: int, b: int, device: torch.device, sizes: Sequence[int], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    starts = dist.get_rank() == a
    peer = b if starts else a
    times = [round(1000 * one_way_us(peer, starts, size, _REPEATS, device, group)) for size in sizes]
    return {"one_way_ns": times, "intact": _echo(peer, starts, device, group)}


def _echo(peer: int, starts: bool, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether random bytes arrive, and come back, as they were."""
    generator = torch.Generator().manual_seed(0)
    sent = torch.randint(256, (_ECHO_BYTES,), dtype=torch.uint8, generator=generator)  # the same on both sides
    received = torch.zeros(_ECHO_BYTES, dtype=torch.uint8, device=device)
    if starts:
        dist.send(sent.to(device), peer, group)
        dist.recv(received, peer, group)
    else:
        dist.recv(received, peer, group)
        dist.send(received, peer, group)
    return torch.equal(received.cpu(), sent)


# --- clocks -----------------------------------------------------------------------------------------------------------


def clocks() -> dict[str, Any]:
    """How far each rank's clock is from that of rank 0, asked several times over about a second.

    Returns:
        `shared`: whether the ranks run on one kernel, so that timelines need no correction; `offsets_ns`: the median
        offset of each rank; `spread_ns`: by how much the answers of each rank differ from each other.
    """
    group = dist.group.WORLD
    assert group is not None
    of_machines = all_gather_json(clock_offset_ns(group))
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = []
    for _ in range(_CLOCK_SAMPLES):
        for other in range(1, size):
            if rank == other:
                mine.append(ask_offset_ns(0, group, _CLOCK_ROUNDS))
            elif rank == 0:
                answer_offset(other, group, _CLOCK_ROUNDS)
        time.sleep(_BETWEEN_SAMPLES_S)
    samples = all_gather_json(mine)
    return {
        "shared": not any(of_machines),
        "offsets_ns": [round(statistics.median(of_rank)) if of_rank else 0 for of_rank in samples],
        "spread_ns": [max(of_rank) - min(of_rank) if of_rank else 0 for of_rank in samples],
    }
