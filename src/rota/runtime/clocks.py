"""The ranks' clocks: what to add to one to get another."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rota.runtime.json_messages import all_gather_json


def clock_offset_ns(group: dist.ProcessGroup, rounds: int = 20) -> int:
    """What to add to this rank's monotonic clock to get rank 0's, in ns.

    Ranks of one machine share the clock. Others ask rank 0 in turn (Cristian, "Probabilistic clock synchronization",
    1989): the fastest of several rounds counts, and rank 0 is taken to have read its clock in the middle of it.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    machines = all_gather_json(_machine(), group)
    offset = 0
    for other in range(1, size):
        if machines[other] != machines[0] and rank in (0, other):
            offset = answer_offset(other, group, rounds) if rank == 0 else ask_offset_ns(0, group, rounds)
    return offset


def answer_offset(peer: int, group: dist.ProcessGroup, rounds: int) -> int:
    """Answer a peer that runs `ask_offset_ns` with this rank's clock. Returns 0, the offset of one's own clock."""
    for _ in range(rounds):
        question = torch.empty(1, dtype=torch.int64, device="cpu")
        dist.recv(question, group_src=peer, group=group)
        dist.send(torch.tensor([time.monotonic_ns()], device="cpu"), group_dst=peer, group=group)
    return 0


def ask_offset_ns(peer: int, group: dist.ProcessGroup, rounds: int) -> int:
    """The peer's clock minus ours, in ns; the peer runs `answer_offset` meanwhile."""
    best_round_ns, offset = None, 0
    for _ in range(rounds):
        asked = time.monotonic_ns()
        dist.send(torch.tensor([asked], device="cpu"), group_dst=peer, group=group)
        answer = torch.empty(1, dtype=torch.int64, device="cpu")
        dist.recv(answer, group_src=peer, group=group)
        round_ns = time.monotonic_ns() - asked
        if best_round_ns is None or round_ns < best_round_ns:
            best_round_ns, offset = round_ns, int(answer) - (asked + round_ns // 2)
    return offset


def _machine() -> str:
    """Identifies the running kernel: processes that share it share its monotonic clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else socket.gethostname()
