"""What is said of a step that fails or hangs on a queued device: where the device is, and not where the host is."""

from __future__ import annotations

import pytest
import torch

from rota import Cluster, Costs, Pipeline, place
from rota.runtime.transport import collective
from rota.schedules import one_f_one_b
from support.networks import batch_of, chain, loss_fn
from support.pool import Pool
from support.sim_device import SimDevice
from support.sim_device.pool import pipelines_on_sim

PLAN = one_f_one_b(place(Costs.uniform(2, 10, 20, boundary_bytes=8), Cluster.uniform(2)), 4)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("by 2 GiB"), torch.AcceleratorError("an assert", 1)])
def test_an_error_of_the_device_is_not_a_lost_rank(error: RuntimeError) -> None:
    with pytest.raises(type(error)), collective("waiting for others"):
        raise error


def reports(rank: int) -> tuple[list[str], list[int]]:
    """The reports, and the kernels reached, where the device has ended less and less of a step."""
    said, reached = [], []
    with SimDevice(f"rank {rank}").active(), pipelines_on_sim([]), Pipeline(chain(2), PLAN, loss_fn) as pipeline:
        pipeline.step(*batch_of(4))
        execution, device = pipeline._engine.plans.base.execution, pipeline._engine.here.device
        handle = pipeline.begin_step(*batch_of(4))
        behind = [mark for mark in execution._run.behind if mark is not None]
        for num_done in (len(behind), 9, 5, 4, 1, 0):
            done = {id(mark) for mark in behind[:num_done]}
            device.is_done = lambda mark, done=done: id(mark) in done  # type: ignore[attr-defined, misc]
            execution.look()
            doing = execution.doing([])
            said.append(f"{'waits' if doing.waits else 'busy'}: {doing.words}")
            reached.append(execution.num_reached)
        del device.is_done  # type: ignore[attr-defined]
        handle.wait()
    return said, reached


@pytest.mark.dist
def test_the_first_kernel_of_each_stream_that_has_not_ended(pool: Pool) -> None:
    (first, reached), (second, _) = pool.run(2, reports)
    assert reached[1:] == [9, 5, 4, 1, 0]
    assert first[5].startswith("busy: has not ended on its device: run 0F0 on compute, send 0F0→1F0 on channel 0→1")
    assert first[2].startswith("waits: waits on its device for other ranks: receive 1B0→0B0 on channel 1→0, run 0B0")
    assert second[4].startswith("waits: waits on its device for other ranks: receive 0F0→1F0 on channel 0→1")
    assert second[3].startswith("busy: has not ended on its device: receive 0F1→1F1 on channel 0→1, run 1B0 on compute")
