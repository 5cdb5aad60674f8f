"""Ranks with uneven work, where no cut balances them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rota import schedules
from rota.accounting import Explanation, explain
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import wave
from rota.core.plan import Plan, Usage

LAYERS = (2, 1, 1, 1, 1, 1, 1, 1)


def uneven(num_layers: tuple[int, ...], forward_us: tuple[int, ...] = (10, 10, 10, 40, 30, 10, 10, 10)) -> Plan:
    """Eight stages on four ranks, down and back up: rank 3 has the two in the middle."""
    plan = schedules.hanayo(wave(Costs(forward_us, forward_us), Cluster.uniform(4)), 4)
    return replace(plan, usage=Usage(tuple("abcdefg"), 1, 1, num_layers))


def cuts(explanation: Explanation) -> bool:
    return any(suggestion.what == "cut" for suggestion in explanation.suggestions)


def test_a_rank_that_cuts_cannot_relieve_bounds_the_step() -> None:
    found = explain(uneven(LAYERS))
    assert not cuts(found)
    assert found.imbalance == (
        "The work of the ranks is uneven: rank 3 has 115% more than the mean. A step takes at least as long as its "
        "work, 560 µs; with as much work in all, but the same on every rank, it could take 260 µs at best. Try fewer "
        "stages, of more layers each, or more places to cut, inside the blocks (`--cuts`, or rota.CutPoint in the "
        "model)."
    )
    assert found.imbalance in found.to_text()
    assert explain(uneven(LAYERS, (16, 16, 16, 17, 16, 16, 16, 17))).timeline.makespan_us >= 260
    assert found.timeline.makespan_us >= 560


@pytest.mark.parametrize(
    ("plan", "is_cut"),
    [
        (uneven(()), True),  # its slowest stage may have several layers
        (uneven((2, 1, 1, 9, 9, 1, 1, 1)), True),
        (uneven(LAYERS, (10,) * 8), False),
    ],
    ids=["unknown layers", "several layers", "even"],
)
def test_even_ranks_and_those_for_which_a_cut_is_advised(plan: Plan, is_cut: bool) -> None:
    found = explain(plan)
    assert found.imbalance == ""
    assert cuts(found) is is_cut
