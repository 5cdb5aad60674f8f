"""Timelines that pages are made of."""

import random

import rota
from support.measured import measured_like

GB = 10**9


def one_f_one_b(num_ranks=4, num_microbatches=8, **costs):
    """With transfers, memory, a limit, and an end of the step."""
    given = {"activation_bytes": GB, "boundary_bytes": 5000, "reduce_us": 150, "optimizer_us": 60, **costs}
    cluster = rota.Cluster.uniform(num_ranks, 8 * GB, latency_us=10, bytes_per_us=1000)
    placement = rota.place(rota.Costs.uniform(num_ranks, 100, 200, **given), cluster)
    return rota.simulate(rota.schedules.one_f_one_b(placement, num_microbatches))


def v_shaped(num_microbatches=6):
    """Two stages per rank, split backwards."""
    costs = rota.Costs.uniform(6, 90, 100, 80, activation_bytes=GB, boundary_bytes=900)
    placement = rota.wave(costs, rota.Cluster.uniform(3, latency_us=4, bytes_per_us=100))
    return rota.simulate(rota.schedules.NAMED["zb_v"](placement, num_microbatches))


def bidirectional():
    """Two streams."""
    costs = rota.Costs.uniform(4, 50, 100, boundary_bytes=10, activation_bytes=7)
    placement = rota.bidirectional(costs, rota.Cluster.uniform(4, latency_us=1))
    return rota.simulate(rota.schedules.NAMED["chimera"](placement, 8))


def wired(num_microbatches=6):
    """Transfers that wait for a host."""
    host = rota.SharedLink("host a", 40, (0, 1, 2, 3), (0, 1, 2, 3))
    cluster = rota.Cluster((None,) * 4, rota.Link(10, 80), shared=(host,))
    costs = rota.Costs.uniform(4, 100, 200, activation_bytes=10**6, boundary_bytes=2000)
    return rota.simulate(rota.schedules.one_f_one_b(rota.place(costs, cluster), num_microbatches))


def measured(planned, seed=1, longest_us=300):
    return measured_like(planned.plan, random.Random(seed), longest_us)


def huge():
    """Times and sizes beyond 32 bits."""
    costs = rota.Costs.uniform(2, 10**9, 2 * 10**9, activation_bytes=10**13)
    return rota.simulate(rota.schedules.gpipe(rota.place(costs, rota.Cluster.uniform(2)), 5))
