"""Links between simulated devices of processes: messages as kernels, in queues that their hosts filled before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from rota import Cluster, Link, PipelineError
from support.pool import Pool

pytestmark = pytest.mark.dist


def cost_ns(name: str, written: Sequence[Any]) -> int:
    """Messages at 1 GB/s after 30 µs, on the side that receives; matrix products of 100 µs."""
    if "recv" in name:
        return 30_000 + sum(block.num_bytes for block in written)
    return 100_000 if "mm" in name else 0


def measured(rank: int) -> tuple[Cluster, list[str], list[str]]:
    """The links of simulated devices, the lines that are told, and where the hosts waited for them."""
    from rota.profiling import device_beside, device_contention, device_links
    from rota.profiling.links import measure_links
    from support.sim_device import SimDevice
    from support.sim_device.runtime_device import SIM

    lines: list[str] = []
    device = SimDevice(f"rank {rank}", cost_ns=cost_ns, host_ns=20_000)
    small = mock.patch.object(device_links, "_NUM_SMALL", 3), mock.patch.object(device_contention, "_WIDTH", 4)
    with device.active(), small[0], small[1], mock.patch.object(device_beside, "_IN_A_ROW", 3):
        cluster = measure_links(2, device=SIM, report=lines.append)
        device.check()
    return cluster, lines, [sync.operation for sync in device.syncs]


def test_all_pairs_are_measured_by_events(pool: Pool) -> None:
    by_rank = pool.run(3, measured)
    first = by_rank[0][0]
    assert first == Cluster((None,) * 3, Link(30, 1000), shared=first.shared)  # messages slow no product here
    (shared,) = first.shared
    assert shared.senders == shared.receivers == (0, 1, 2)
    assert 4 * 62_500 / shared.bytes_per_us == pytest.approx(30 + 62.5, rel=0.2)  # four directions, all at once
    for rank, (cluster, _, syncs) in enumerate(by_rank):
        assert cluster == first
        assert {*syncs} <= {"times_ns", "synchronize"}
        num_channels = 4 if rank == 1 else 2  # to its neighbours
        assert syncs.count("synchronize") == 2 + num_channels  # each is opened once, and one of each pair before
    lines = by_rank[0][1]
    times = "1 kB 31 µs, 4 kB 34 µs, 16 kB 46 µs, 64 kB 94 µs, 256 kB 286 µs; 31 µs behind a kernel"
    rates = "(895 MB/s; in a row 895 MB/s)"
    told = [f"{a} → {b}: {times} {rates}" for a in range(3) for b in range(3) if a != b]
    assert lines[2:8] == told
    assert lines[:2] == [
        "messages between 3 devices, one pair at a time",
        "messages between all neighbours at once, and beside kernels",
    ]
    assert "at once" in lines[8]
    assert lines[9].startswith("62.5 kB take a matrix product beside them 0 µs at its sender and 0 µs at its receiver")
    assert lines[10].startswith("the host needs ")
    assert by_rank[1][1] == by_rank[2][1] == []


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
