"""Links between devices, on known times: the sizes that are measured, what is fitted to them, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rota import Link, PipelineError
from rota.profiling import device_links
from rota.profiling.device_links import SIZES, LinkSample, fitted, implausible, line_of, samples_of, samples_text
from rota.profiling.link_fits import Line, link_of_lines
from rota.profiling.links import _both, cluster_of

Times = Callable[[int], float]


def line(latency_us: float, bytes_per_us: float) -> Times:
    return lambda num_bytes: latency_us + num_bytes / bytes_per_us


class Known:
    """A side of two devices whose messages take known times in each direction; in a row they come without latency."""

    def __init__(self, there: Times, back: Times) -> None:
        self.there, self.back, self.pause_us = there, back, 0.0  # how much later a message comes behind a kernel
        self.counts: dict[int, int] = {}

    def round_trip_us(self, there_bytes: int, back_bytes: int, count: int) -> float:
        self.counts[max(there_bytes, back_bytes)] = count
        return self.there(there_bytes) + self.back(back_bytes)

    def interval_us(self, num_bytes: int, count: int, *, there: bool) -> float:
        of = self.there if there else self.back
        return max(of(num_bytes) - of(0), 0.1)

    def paced_us(self, num_bytes: int, count: int) -> float:
        return self.pause_us + (self.there(num_bytes) + self.back(num_bytes)) / 2


def test_sizes_go_from_a_kilobyte_to_hundreds_of_megabytes() -> None:
    assert (SIZES[0], SIZES[-1]) == (1000, 256_000_000)
    side = Known(line(10, 40_000), line(10, 40_000))
    there, back = samples_of(side, SIZES, 5)
    assert [sample.num_bytes for sample in there] == [*SIZES]
    assert there == back
    assert all(sample.one_way_us == pytest.approx(10 + sample.num_bytes / 40_000) for sample in there)
    assert (side.counts[1000], side.counts[256_000_000]) == (20, 5)
    assert fitted(there) == Link(10, 40_000)
    assert samples_text(there).startswith("1 kB 10 µs, 4 kB 10 µs, ")
    assert samples_text(there).endswith("(39.9 GB/s; in a row 40 GB/s)")


def test_the_directions_are_told_apart() -> None:
    """A reply is small, so a large message's time is its own; only the latencies cannot be told apart."""
    there, back = samples_of(Known(line(20, 25_000), line(20, 12_000)), SIZES, 3)
    assert (fitted(there), fitted(back)) == (Link(20, 25_000), Link(20, 12_000))
    links = dict(_both((0, 1), {(0, 1): there, (1, 0): back}))
    assert links == {(0, 1): line_of(there), (1, 0): line_of(back)}
    cluster = cluster_of(2, {pair: link_of_lines(of, Line(), Line()) for pair, of in links.items()})
    assert cluster.link_between(0, 1) == Link(20, 25_000)
    assert cluster.link_between(1, 0) == Link(20, 12_000)


def test_directions_that_differ_by_no_more_than_measurements_are_one() -> None:
    there, back = samples_of(Known(line(20, 25_000), line(20, 24_000)), SIZES, 3)
    links = dict(_both((0, 1), {(0, 1): there, (1, 0): back}))
    assert links[0, 1] == links[1, 0]
    assert 24_000 <= (links[0, 1].bytes_per_us or 0) <= 25_000


def test_messages_behind_kernels_come_later_at_every_size() -> None:
    side = Known(line(20, 25_000), line(20, 25_000))
    side.pause_us = 12.0
    there, _ = samples_of(side, SIZES, 3)
    assert fitted(there) == Link(32, 25_000)
    assert "; 32 µs behind a kernel (" in samples_text(there)
    side.pause_us = -5.0  # by chance: a message alone is not faster than one directly after another
    assert fitted(samples_of(side, SIZES, 3)[0]) == Link(20, 25_000)


def test_slow_links_are_not_measured_with_huge_messages() -> None:
    there, _ = samples_of(Known(line(50, 100), line(50, 100)), SIZES, 3)  # 100 MB/s
    assert [sample.num_bytes for sample in there] == [*SIZES[:8]]  # 16 MB took 160 ms, and 64 MB would take 640
    assert there[-1].one_way_us < 200_000


def test_two_samples_are_met_exactly_and_more_as_nearly_as_can_be() -> None:
    exact = [LinkSample(1000, 12.0, 1.0), LinkSample(4_001_000, 112.0, 1.0)]
    assert fitted(exact) == Link(12, 40_000)

    def as_nccl(num_bytes: int) -> float:  # another protocol from 1 MB on: some µs more, at a higher rate
        return 8 + num_bytes / 10_000 if num_bytes < 1_000_000 else 30 + num_bytes / 45_000

    samples = samples_of(Known(as_nccl, as_nccl), SIZES, 3)[0]
    link = fitted(samples)
    assert 8 <= link.latency_us <= 12
    off = [link.transfer_us(sample.num_bytes) / sample.one_way_us for sample in samples]
    assert 0.4 < min(off) < max(off) < 1.5
    flat = [LinkSample(1000, 9.0, 1.0), LinkSample(4000, 9.0, 1.0)]
    assert fitted(flat).latency_us == 9
    assert fitted(flat).transfer_us(1_000_000) <= 10


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ([LinkSample(1_000_000, 0.0, 5.0)], r"1 MB alone took 0\.0 µs"),
        ([LinkSample(1_000_000, 30.0, -1.0)], r"1 MB in a row took -1\.0 µs"),
        ([LinkSample(64_000_000, 10.0, 1500.0)], r"64 MB alone took 10\.0 µs, more than 4 TB/s"),
        ([LinkSample(64_000_000, 1500.0, 10.0)], r"64 MB in a row took 10\.0 µs, more than 4 TB/s"),
        (
            [LinkSample(1_000_000, 90.0, 20.0), LinkSample(4_000_000, 30.0, 20.0)],
            r"4 MB took 30\.0 µs, and 1 MB 90\.0 µs",
        ),
    ],
)
def test_times_that_cannot_be_are_told(samples: list[LinkSample], told: str) -> None:
    assert implausible([LinkSample(1000, 8.0, 2.0)]) == ""
    with pytest.raises(AssertionError, match=told):
        assert not implausible(samples), implausible(samples)


def test_what_cannot_be_is_measured_again_and_then_refused() -> None:
    tries: list[int] = []

    def wrong_at_first(num_bytes: int) -> float:
        tries.append(num_bytes)
        return -50.0 if len(tries) < 2 else 10 + num_bytes / 40_000

    side = Known(wrong_at_first, line(10, 40_000))
    found = device_links._samples_of_pair(side, (0, 3), SIZES[:4], 3)
    assert {*found} == {(0, 3), (3, 0)}
    assert fitted(found[0, 3]) == Link(10, 40_000)
    side = Known(lambda num_bytes: 1e-3, lambda num_bytes: 1e-3)
    with pytest.raises(PipelineError, match=r"between processes 0 and 3 cannot be measured: .*, 3 times in a row; end"):
        device_links._samples_of_pair(side, (0, 3), SIZES, 3)
