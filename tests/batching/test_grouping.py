"""Groups are those that take the least time in all, of all that may be."""

import numpy as np
from hypothesis import given, settings, strategies as st

from rota import Cluster, Curve, Size, SizeModel, place
from rota.batching.figures import Layout
from rota.batching.grouping import Grouper, _split
from support.sampling import some

LIMIT_BYTES = 100_000  # of each rank, without what is static


def least_us(sorted_lengths: list[int], curve: Curve, packed: bool, room_bytes: float, limit_us: float) -> float:
    """The least time of all groups of neighbours, by trying every begin of the last group."""
    measure = Size.packed if packed else Size.padded
    least = [0.0]
    for end in range(1, len(sorted_lengths) + 1):
        totals = []
        for begin in range(end):
            size = measure(sorted_lengths[begin:end])
            if end - begin == 1 or (curve.at(size) <= limit_us and 10 * size.tokens <= room_bytes):
                totals.append(least[begin] + curve.at(size))
        least.append(min(totals))
    return least[-1]


@settings(max_examples=some(40))
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40),
    st.booleans(),
    st.floats(1.0, 12.0),
    st.sampled_from([np.inf, 200.0, 20.0]),
)
def test_groups_take_the_least_time(lengths: list[int], packed: bool, num_in_flight: float, limit_us: float) -> None:
    curve = Curve(10, 0.05, 1e-3)
    model = SizeModel((curve,) * 2, (Curve(0),) * 2, activation_bytes=(Curve(0, 10),) * 2, boundary_bytes=(Curve(0),))
    layout = Layout.of(model, Cluster.uniform(2, LIMIT_BYTES), place)
    grouper = Grouper(layout, lengths, packed)
    starts = _split(grouper._groups(float(limit_us), num_in_flight))
    room_bytes = (LIMIT_BYTES - 2 * len(layout.sorted_tasks)) / num_in_flight
    expected_us = least_us(sorted(lengths, reverse=True), curve, packed, room_bytes, limit_us)
    sizes = grouper.sizes(starts)
    assert np.isclose(sum(curve.at(size) for size in sizes), expected_us)
    groups = grouper.samples(starts)
    assert sorted(sample for group in groups for sample in group) == [*range(len(lengths))]
    measure = Size.packed if packed else Size.padded
    assert [*sizes] == [measure([lengths[i] for i in group]) for group in groups]
