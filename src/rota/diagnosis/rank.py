"""What `rota doctor` does on each rank: it names its device, exchanges messages with others, and trains a small model.

`rota.runtime.launching` starts this file; the first rank writes what was found to the file that is its argument.
"""

from __future__ import annotations

import copy
import json
import math
import socket
import sys
import time
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import place
from rota.core.plan import Plan
from rota.diagnosis.report import say
from rota.models import Stages
from rota.runtime import Pipeline, local_device
from rota.runtime.device.local import property_of
from rota.runtime.faults.watchdog import PATIENT, Watchdog, limit_s
from rota.runtime.json_messages import all_gather_json
from rota.runtime.process_group import join, leave
from rota.schedules import zb_h1

_MOST_RANKS = 16  # of which each pair is measured; of more, only neighbours
_BYTES = 16_000_000  # of a large message
_REPEATS = 7
_STEPS, _ROWS, _WIDTH = 3, 4, 32


def examine_together(write: Callable[[str, Any], None]) -> None:
    """Name the devices, measure links, and run the self-test. Collective: the ranks of `rota run` or torchrun.

    Args:
        write: Called on the first rank with the name of a result, and the result.
    """
    owns = join()
    is_first = dist.get_rank() == 0
    write = write if is_first else lambda *_: None
    if is_first:
        say("devices, and messages between them")
    device = local_device()
    watchdog = Watchdog(limit_s(None))
    try:
        with watchdog.watching("the other ranks to name their devices", PATIENT):
            write("ranks", all_gather_json(describe(device)))
        with watchdog.watching("messages between two ranks at a time"):
            write("links", measure_links(device, watchdog.tick))
    finally:
        watchdog.close()
    if is_first:
        say("self-test")
    write("self_test", max(all_gather_json(train(plan_of(dist.get_world_size()), device))))
    if owns:
        leave([dist.group.WORLD])


def describe(device: torch.device) -> dict[str, Any]:
    """The host and the device of this rank, and the device's memory; None on the CPU."""
    name = ""
    memory: tuple[int | None, int | None] = None, None
    if device.type != "cpu":
        name, memory = property_of(device, "name") or "", torch.accelerator.get_memory_info(device)
    fields = {"host": socket.gethostname(), "device": str(device), "name": name}
    return fields | dict(zip(("free_bytes", "total_bytes"), memory, strict=True))


# --- links ------------------------------------------------------------------------------------------------------------


def measure_links(device: torch.device, tick: Callable[[], None]) -> list[dict[str, Any]]:
    """Latency and rate between each pair of ranks, one pair at a time, by the backend that a run uses. Collective.

    Args:
        device: This rank's.
        tick: Called after each pair.

    Returns:
        On all ranks, a JSON object per pair: half of the fastest round trip of one byte, and the rate of a large
        message.
    """
    own: dict[str, Any] = {}
    ranks = range(dist.get_world_size())
    pairs = [*(combinations(ranks, 2) if len(ranks) <= _MOST_RANKS else pairwise(ranks))]
    for a, b in pairs:
        group = dist.new_group([a, b], backend=dist.get_default_backend_for_device(device))
        if dist.get_rank() in (a, b):
            peer = b if dist.get_rank() == a else a
            small_ns, large_ns = (_one_way_ns(peer, size, device, group) for size in (1, _BYTES))
            rate = round(_BYTES * 1e9 / large_ns)
            own[f"{a}-{b}"] = {"ranks": [a, b], "latency_ns": small_ns, "bytes_per_s": rate}
            dist.destroy_process_group(group)
        dist.barrier()  # the next pair has the machine to itself
        tick()
    of_ranks = all_gather_json(own)
    return [of_ranks[a][f"{a}-{b}"] for a, b in pairs]


def _one_way_ns(peer: int, num_bytes: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Half of the fastest round trip of a message, which the lower rank begins."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    begins, times = dist.get_rank() < peer, []
    for _ in range(1 + _REPEATS):  # the first one makes the connection
        start = time.perf_counter_ns()
        if begins:
            dist.send(message, peer, group)
        dist.recv(message, peer, group)
        if not begins:
            dist.send(message, peer, group)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter_ns() - start)
    return max(min(times[1:]) // 2, 1)


# --- the self-test ----------------------------------------------------------------------------------------------------


def plan_of(num_ranks: int) -> Plan:
    """What the self-test runs: forwards, and backwards that are split into I and W."""
    costs = Costs.uniform(num_ranks, 1000, 1000, weight_us=1000, activation_bytes=0, boundary_bytes=8 * _ROWS * _WIDTH)
    return zb_h1(place(costs, Cluster.uniform(num_ranks)), 2 * num_ranks)


def train(plan: Plan, device: torch.device) -> float:
    """Train a model in float64 for some steps, on the plan's ranks and unsplit on the CPU. Collective.

    Returns:
        The largest relative difference of a loss, or of a weight of this rank at the end; inf if one is not finite.
    """
    torch.manual_seed(0)  # one small layer per stage, the same on all ranks
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH, dtype=torch.float64), nn.Tanh()) for _ in range(plan.num_stages)]
    unsplit = nn.Sequential(*copy.deepcopy(layers))
    stages = Stages([layer.to(device) for layer in layers])
    generator = torch.Generator().manual_seed(0)
    differences = []
    with Pipeline(stages, plan, functional.mse_loss) as pipeline:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (pipeline, unsplit)]
        for _ in range(_STEPS):
            shape = 2, plan.num_microbatches * _ROWS, _WIDTH
            inputs, targets = torch.randn(shape, dtype=torch.float64, generator=generator)
            loss = pipeline.step(inputs.to(device), targets.to(device))
            expected = functional.mse_loss(unsplit(inputs), targets)
            expected.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            differences.append(_relative(torch.tensor(loss, dtype=torch.float64), expected))
        weights = (weight for stage in stages.modules for weight in stage.parameters())
        twins = dict(zip(weights, unsplit.parameters(), strict=True))
        differences += [_relative(weight, twins[weight]) for weight in pipeline.parameters()]
    return max(differences)


def _relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    difference = float((value.detach().cpu() - expected.detach()).abs().max() / expected.detach().abs().max())
    return difference if math.isfinite(difference) else math.inf


def main(path: str) -> None:
    """On one of the ranks that `examination` starts."""
    with Path(path).open("a") as results:
        examine_together(lambda *result: print(json.dumps(result), file=results, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
