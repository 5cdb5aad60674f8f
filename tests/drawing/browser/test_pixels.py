"""Pixel truth: at every zoom what is drawn covers what is busy, so that bubbles neither vanish nor grow."""

import random
from bisect import bisect_right
from itertools import accumulate

import pytest

from drawing.browser.timelines import measured, one_f_one_b
from support.sampling import IS_WHOLE

NUM_WINDOWS = 200
ZOOMS = (1, 6, 40, 300, 5000) if IS_WHOLE else (1, 40, 5000)


@pytest.fixture(scope="module")
def crowded():
    """8,192 ops of all lengths, with gaps of all lengths: far more than there are pixels."""
    return measured(one_f_one_b(8, 512), longest_us=200)


def busy_until(timeline, rank):
    """The time in ops from 0 to any time, op by op."""
    starts, ends = timeline.starts_us[rank], timeline.ends_us[rank]
    before = [0, *accumulate(end - start for start, end in zip(starts, ends, strict=True))]

    def until(time):
        i = bisect_right(starts, time)
        return before[i - 1] + min(time, ends[i - 1]) - starts[i - 1] if i else 0

    return until


@pytest.mark.parametrize("scale", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_any_window_is_covered_as_its_rank_is_busy(crowded, open_page, scale):
    it, chooser = open_page(crowded, scale=scale), random.Random(scale)
    for zoom in ZOOMS:
        width = crowded.makespan_us / zoom
        start = chooser.uniform(0, crowded.makespan_us - width)
        it.ask("(hash) => { location.hash = hash; }", f"t={start:.2f}-{start + width:.2f}")
        it.page.wait_for_function("(t0) => Math.abs(window.rota.view.t0 - t0) < 0.01", arg=start)
        it.settle()
        t0, t1 = it.view()
        assert t1 - t0 == pytest.approx(width, abs=0.02)
        rows = [[0, *accumulate(it.drawn(rank)[3::4])] for rank in range(crowded.num_ranks)]
        until = [busy_until(crowded, rank) for rank in range(crowded.num_ranks)]
        pixels = len(rows[0]) - 1
        assert pixels > 1000 * scale
        off = []
        for _ in range(NUM_WINDOWS):
            rank = chooser.randrange(crowded.num_ranks)
            left, right = sorted(chooser.sample(range(pixels + 1), 2))
            drawn = (rows[rank][right] - rows[rank][left]) / 255
            a, b = (t0 + x * (t1 - t0) / pixels for x in (left, right))
            off.append(abs(drawn - (until[rank](b) - until[rank](a)) * pixels / (t1 - t0)))
        assert max(off) < 1
        if zoom == 1:  # and not because all is alike: gaps are narrower than pixels there
            assert 0.2 < rows[0][-1] / 255 / pixels < 0.95
