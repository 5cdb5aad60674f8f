"""Links between simulated devices of processes: messages as kernels, by the pipelines and events of every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from rota import Cluster, PipelineError
from support.pool import Pool
from support.sim_device import SimDevice
from support.sim_device.runtime_device import SIM

pytestmark = pytest.mark.dist


def cost_ns(name: str, written: Sequence[Any]) -> int:
    """Messages at 1 GB/s after 30 µs, on the side that receives; matrix products of 100 µs."""
    if "recv" in name:
        return 30_000 + sum(block.num_bytes for block in written)
    return 100_000 if "mm" in name else 0


def measured(rank: int) -> Cluster:
    """The links of simulated devices."""
    from rota.profiling import link_pipelines
    from rota.profiling.links import measure_links

    device = SimDevice(f"rank {rank}", cost_ns=cost_ns, host_ns=20_000)
    with device.checked(), mock.patch.object(link_pipelines, "_PACE_NS", 1):
        return measure_links(1, device=SIM)


def test_links_between_devices_are_those_of_their_kernels(pool: Pool) -> None:
    first, *others = pool.run(2, measured)
    assert others == [first]
    assert first.all_reduces == ()
    assert first.link.latency_us == pytest.approx(30, abs=30)
    assert first.link.bytes_per_us == pytest.approx(1000, rel=0.1)
    (shared,) = first.shared
    assert shared.senders == shared.receivers == (0, 1)


def on_cpu_and_sim(rank: int) -> Any:
    from rota.profiling.links import measure_links

    with SimDevice().active():
        try:
            measure_links(device=SIM if rank else None)
        except PipelineError as error:
            return str(error)


def test_mixed_devices_are_refused(pool: Pool) -> None:
    told = "measured between devices of one type, but there are process 0 on cpu, process 1 on sim; "
    assert all(told in error for error in pool.run(2, on_cpu_and_sim))
