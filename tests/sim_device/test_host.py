"""What the host does for each op and message of a step, and that a device never waits for a host that does not wait."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest

from rota import Cluster, Costs, Pipeline, Plan, place
from rota.runtime.device.streams import StreamDevice
from rota.schedules import gpipe
from support.networks import batch_of, chain, loss_fn, plan_for
from support.pool import Pool
from support.sim_device import HostSync, SimDevice
from support.sim_device.groups import SIM

HOST_NS, KERNEL_NS = 20_000, 30_000  # to enqueue a kernel, and to run it: the device is the slower one, if only just


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("waits", [False, True])
def test_the_device_is_idle_between_steps_only_if_the_host_waits(waits: bool) -> None:
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(1), [0, 0]), 4)
    with SimDevice(cost_ns=lambda *_: KERNEL_NS, host_ns=HOST_NS).checked() as device:
        with Pipeline(chain(2).to(SIM), plan, loss_fn) as pipeline:
            batch = [tensor.to(SIM) for tensor in batch_of(4)]
            pipeline.step(*batch)
            device.synchronize()
            before_ns, num_before, num_steps = device.now_ns, device.num_kernels, 6
            for _ in range(num_steps):
                pipeline.step(*batch) if waits else pipeline.begin_step(*batch)
            busy_ns = (device.num_kernels - num_before) * KERNEL_NS
            idle_ns = device.default.free_ns - before_ns - busy_ns
        assert idle_ns >= num_steps * HOST_NS if waits else idle_ns == HOST_NS


def counts(rank: int, plan: Plan) -> tuple[int, int, list[HostSync]]:
    """Of a step what it asks of this rank's device, its kernels, and the waits of the host."""
    with SimDevice(f"rank {rank}").checked() as device, ExitStack() as patches:
        asked = [
            patches.enter_context(patch.object(StreamDevice, name, autospec=True, side_effect=original))
            for name, original in vars(StreamDevice).items()
            if name in ("mark_on", "record", "wait", "use")
        ]
        batch = [tensor.to(SIM) for tensor in batch_of(plan.num_microbatches)]
        with Pipeline(chain(2).to(SIM), plan, loss_fn) as pipeline:
            for _ in range(3):
                pipeline.begin_step(*batch)
            before, num_kernels, num_syncs = sum(ask.call_count for ask in asked), device.num_kernels, len(device.syncs)
            pipeline.begin_step(*batch)
            asks = sum(ask.call_count for ask in asked) - before
            return asks, device.num_kernels - num_kernels, device.syncs[num_syncs:]


def unsplit_kernels(plan: Plan) -> int:
    """The kernels of the unsplit model in a step."""
    with SimDevice().checked() as device:
        stages, n = chain(2).to(SIM), plan.num_microbatches
        batch = [tensor.to(SIM) for tensor in batch_of(n)]
        kernels = device.num_kernels
        for x, target in zip(*(part.chunk(n) for part in batch), strict=True):
            (loss_fn(stages.run(x), target) / n).backward()
        return device.num_kernels - kernels


@pytest.mark.dist
@pytest.mark.parametrize(("schedule", "weight_us"), [("1f1b", None), ("zb_h1", 7)])
def test_what_the_host_does_per_op_and_message(pool: Pool, schedule: str, weight_us: int | None) -> None:
    """How long that takes is measured in benchmarks/host_cost: here it is counted, so that it cannot grow unseen."""
    plan = plan_for(2, schedule, 16, weight_us=weight_us)
    by_rank = pool.run(2, counts, plan)
    num_actions = [len(ops) + len(plan.transfers) for ops in plan.orders]
    assert sum(kernels for _, kernels, _ in by_rank) - unsplit_kernels(plan) <= 0.5 * sum(num_actions)
    for number, (asks, _, waits) in zip(num_actions, by_rank, strict=True):
        assert waits == []
        assert asks <= 3.5 * number
