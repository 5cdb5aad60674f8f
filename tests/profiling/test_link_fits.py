"""Lines through times of messages: exact on times that are on a line, and what is left of a message for the link."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rota import Link
from rota.profiling.link_fits import Line, Sample, line_through, link_of_lines, rate_of_rounds, sample_of

SIZES = (1, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
latencies = st.integers(0, 5000)
rates = st.integers(50, 100_000)


@given(latencies, rates, st.lists(st.integers(1, 1 << 26), min_size=2, max_size=8, unique=True))
def test_times_on_a_line_are_met_exactly(latency_us: int, rate: int, sizes: list[int]) -> None:
    found = line_through([(size, latency_us + size / rate) for size in sizes])
    for size in sizes:
        exact = latency_us + size / rate
        assert abs(found.at(size) - exact) <= 1e-6 * max(exact, 1)


@given(latencies, rates)
def test_of_the_sizes_that_are_measured_the_link_is_the_one_that_made_the_times(latency_us: int, rate: int) -> None:
    found = line_through([(size, latency_us + size / rate) for size in SIZES])
    assert link_of_lines(found, Line(), Line()) == Link(latency_us, rate)


@given(latencies, rates, st.floats(0, 0.1), st.randoms(use_true_random=False))
def test_noise_moves_the_line_by_no_more_than_itself(
    latency_us: int, rate: int, noise: float, chance: random.Random
) -> None:
    points = [(size, (latency_us + size / rate) * (1 + noise * chance.uniform(-1, 1))) for size in SIZES]
    found = line_through(points)
    off = [found.at(size) / us - 1 for size, us in points]
    assert sum(of * of for of in off) <= len(points) * (noise / (1 - noise)) ** 2 + 1e-9  # the true line is no nearer


def test_no_part_of_a_line_is_negative() -> None:
    assert line_through([(1000, 9.0), (4000, 6.0)]).us_per_byte == 0
    below = line_through([(1000, 1.0), (2000, 3.0), (4000, 7.0)])
    assert below.us == 0
    assert 1e-3 < below.us_per_byte < 7 / 4000
    assert line_through([(1, 0.0), (1000, 0.0)], 20.0) == Line(0.0, 0.0)
    assert line_through([(64, 12.0)]) == Line(12.0, 0.0)
    assert Line(5.0, 0.0).bytes_per_us is None
    assert Line(5.0, 1e-9).bytes_per_us is None  # a petabyte per second is no limit
    assert Line(5.0, 10.0).bytes_per_us == 1


@given(
    st.integers(0, 300), st.integers(0, 300), st.integers(0, 400),
    st.floats(0, 1e-3), st.floats(0, 1e-3), st.floats(1e-5, 1e-3),
)  # fmt: skip
def test_costs_and_link_together_take_what_was_measured(
    send_us: int, receive_us: int, wire_us: int, send: float, receive: float, wire: float
) -> None:
    """The three parts in a row, as a plan counts a message, are the time of a message alone."""
    sends, receives = Line(send_us, send), Line(receive_us, receive)
    alone = Line(send_us + receive_us + wire_us, send + receive + wire)
    link = link_of_lines(alone, sends, receives)
    assert (link.send_us, link.receive_us, link.latency_us) == (send_us, receive_us, wire_us)
    for size in SIZES:
        counted_us = link.send_cost_us(size) + link.transfer_us(size) + link.receive_cost_us(size)
        # Rates are whole numbers of bytes per µs, and a link of which 2 % are left counts as without limit.
        assert abs(counted_us - alone.at(size)) <= 3 + 0.03 * alone.at(size)


def test_costs_above_what_a_message_takes_leave_nothing_to_the_link() -> None:
    link = link_of_lines(Line(60.0, 2e-4), Line(165.0, 3e-4), Line(115.0, 1e-4))
    assert link == Link(0, None, 165, 3333, 115, 10000)


def test_what_repeats_say() -> None:
    assert sample_of(8, [5.0]) == Sample(8, 5.0, 0.0, 5.0)
    assert sample_of(8, [4.0, 1.0, 2.0, 3.0, 100.0]) == Sample(8, 3.0, 2.0, 2.0)
    assert sample_of(8, [4.0, 1.0, 2.0, 3.0, 100.0]).spread == 2 / 3
    assert sample_of(8, [0.0, 0.0]).spread == 0


@given(st.integers(2, 8), st.integers(500, 50_000), st.floats(0, 500), st.floats(0, 1e-4))
def test_rounds_that_ranks_and_a_shared_link_make_give_its_rate_back(
    num_ranks: int, rate: int, cost_us: float, cost_per_byte: float
) -> None:
    num_messages, num_sent, cost = 2 * (num_ranks - 1), min(num_ranks - 1, 2), Line(cost_us, cost_per_byte)
    sizes = (1 << 20, 1 << 22)
    served = {size: num_messages * size / rate for size in sizes}
    rounds = [sample_of(size, [served[size] + num_sent * cost.at(size)]) for size in sizes]
    found = rate_of_rounds(rounds, num_messages, num_sent, cost)
    assert rate <= found * (1 + 1e-9)
    if all(num_sent * cost.at(size) < 8 * served[size] for size in sizes):
        assert abs(found / rate - 1) < 1e-9
