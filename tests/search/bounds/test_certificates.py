"""Certificates: a checker that knows nothing of Rota proves each bound from them, and never more than is true."""

from dataclasses import replace
from random import Random

import pytest

from rota import simulate
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import place, wave
from rota.search import bounds
from rota.search.problem import Problem
from support.problem_library import proven_us
from support.sampling import IS_WHOLE, some
from support.search_brute_force import every_plan, tiny_step
from support.tessel_shapes import tessel


def check_certificates(seed: int, most: int) -> tuple[int, int]:
    """(bounds, of these with a certificate) for one random placement without, and with tight, limits."""
    chooser = Random(seed)
    placement, num_microbatches = tiny_step(chooser)
    timelines = map(simulate, every_plan(placement, num_microbatches, most, in_order=True))
    rows = [(timeline.peak_memory_bytes, timeline.makespan_us) for timeline in timelines]
    if not rows:
        return 0, 0
    proven_bounds = written = 0
    for limits in (None, min(rows, key=lambda row: (sum(row[0]), row[1]))[0], chooser.choice(rows)[0]):
        fitting = [row for row in rows if limits is None or all(a <= b for a, b in zip(row[0], limits, strict=True))]
        cluster = replace(placement.cluster, limit_bytes=limits or (None,) * placement.num_ranks)
        problem = Problem(replace(placement, cluster=cluster), num_microbatches)
        for bound in bounds.every(problem):
            certificate = bound.proof and bounds.certificate_of(problem, bound.proof)
            proven_bounds += bound.proof is not None
            if certificate:
                written += 1
                proven = proven_us(problem.placement, num_microbatches, certificate)
                assert proven is not None
                assert proven <= min(us for _, us in fitting), (seed, limits, bound, certificate, proven)
    return proven_bounds, written


def test_no_certificate_proves_more_than_the_best_of_all_orders() -> None:
    counts = [check_certificates(seed, most=60) for seed in range(some(150))]
    proven_bounds, written = map(sum, zip(*counts, strict=True))
    assert proven_bounds > 3 * some(150)
    assert written > (0.95 if IS_WHOLE else 0.9) * proven_bounds


@pytest.mark.parametrize(
    ("name", "limit"), [("v", 3), ("x", 2), ("x", 3), ("x", 4), ("m", 3), ("nn", 3), ("nn-eager", 6), ("k", 2)]
)
def test_all_of_a_bound_is_proven_on_tessels_shapes(name: str, limit: int) -> None:
    for num_ranks in (4, 8):
        problem = Problem(tessel(name, num_ranks, limit * num_ranks // 4), 64)
        bound = bounds.best(problem)
        assert bound.proof is not None
        certificate = bounds.certificate_of(problem, bound.proof)
        assert certificate is not None
        assert proven_us(problem.placement, 64, certificate) == bound.us


@pytest.mark.parametrize("seed", range(6))
def test_all_of_a_bound_is_proven_under_memory_limits(seed: int) -> None:
    chooser = Random(seed)
    times = ([chooser.randrange(70, 130) for _ in range(8)] for _ in range(3))
    costs = Costs(*times, activation_bytes=2)  # type: ignore[arg-type]
    arguments = set()
    for limit in (4, 6, 8, 12):
        for placement in (place(costs, Cluster.uniform(8, limit, 3)), wave(costs, Cluster.uniform(4, limit, 3))):
            problem = Problem(placement, 24)
            for bound in bounds.every(problem):
                if bound.proof is not None:
                    certificate = bounds.certificate_of(problem, bound.proof)
                    assert certificate is not None
                    assert (proven_us(placement, 24, certificate) or 0) >= bound.us, bound
                    arguments.add(bound.proof.argument)
    assert arguments == {"load", "path", "area"}
