"""Links between simulated devices of processes: messages as kernels, in queues that their hosts filled before."""

from __future__ import annotations

from typing import Any

import pytest

from rota import Cluster, PipelineError
from support.pool import Pool

pytestmark = pytest.mark.dist


def measured(rank: int) -> tuple[Cluster, list[str], list[str]]:
    """The links of simulated devices, the lines that are told, and where the hosts waited for them."""
    from rota.profiling.links import measure_links
    from support.sim_device import SimDevice
    from support.sim_device.runtime_device import SIM

    lines: list[str] = []
    device = SimDevice(f"rank {rank}", cost_ns=lambda name, written: 20_000)
    with device.active():
        cluster = measure_links(2, device=SIM, report=lines.append)
        device.check()
    return cluster, lines, [sync.operation for sync in device.syncs]


def test_all_pairs_are_measured_by_events(pool: Pool) -> None:
    by_rank = pool.run(3, measured, timeout_s=100)
    clusters = [cluster for cluster, _, _ in by_rank]
    assert clusters[1:] == clusters[:1] * 2
    assert clusters[0].num_ranks == 3
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    assert all(clusters[0].link_between(*pair).bytes_per_us for pair in pairs)
    lines = by_rank[0][1]
    assert [line[:7] for line in lines] == [f"{a} → {b}: " for a, b in pairs]
    assert all(": 1 kB " in line and "in a row" in line for line in lines)
    assert by_rank[1][1] == by_rank[2][1] == []
    for _, _, syncs in by_rank:
        assert {*syncs} <= {"times_ns", "synchronize"}
        assert syncs.count("synchronize") == 2  # once for each pair: to open its channel


def on_cpu_and_sim(rank: int) -> Any:
    from rota.profiling.links import measure_links
    from support.sim_device import SimDevice
    from support.sim_device.runtime_device import SIM

    with SimDevice().active():
        try:
            measure_links(device=SIM if rank else None)
        except PipelineError as error:
            return str(error)


def test_mixed_devices_are_refused(pool: Pool) -> None:
    told = "measured between devices of one type, but there are process 0 on cpu, process 1 on sim; "
    assert all(told in error for error in pool.run(2, on_cpu_and_sim))
