"""Whatever `check` lets pass runs to its end, with the unsplit model's losses and gradients."""

import os
import random
import time
from typing import Any

import pytest

from rota import Plan, Stages
from support.networks import assert_as_unsplit, batch_of, graph_of_layers
from support.pool import Pool
from support.random_plans import random_plan, with_random_wires
from support.sampling import some, swept

NUM_PLANS = int(os.environ.get("ROTA_RANDOM_PLANS", some(40)))  # for each number of ranks; `make fuzz` runs more
AT_ONCE = 100  # in one job of the pool


CHANCE = random.Random(os.getpid())  # of its own on each rank


def take_its_time(*_: Any) -> None:
    """Every stage takes as long as it likes, not what the plan says."""
    time.sleep(0.002 * CHANCE.random() ** 4)


def random_case(seed: int, num_ranks: int) -> tuple[Stages, Plan, list[Any]]:
    """Some stages with one weight, if they are on one rank each; every third plan sends in an order of service."""
    edges, plan = random_plan(seed, num_ranks)
    if seed % 3 == 1:
        plan = with_random_wires(plan, seed)
    stages = graph_of_layers(plan.num_stages, edges, seed)
    for module in stages.modules:
        module.register_forward_pre_hook(take_its_time)
    alone = [stage for stage in plan.placement.stages if len(plan.placement.ranks_of(stage)) == 1]
    for stage in alone[::2] if seed % 4 == 0 else ():
        stages[stage].linear.weight = stages[alone[0]].linear.weight
    return stages, plan, [batch_of(plan.num_microbatches, seed) for seed in (1, 2)]


@pytest.mark.parametrize("num_ranks", [swept(2), 3, swept(4)])
def test_random_orders(pool: Pool, num_ranks: int) -> None:
    for first in range(0, NUM_PLANS, AT_ONCE):
        run_and_compare(pool, num_ranks, range(first, min(first + AT_ONCE, NUM_PLANS)))


def run_and_compare(pool: Pool, num_ranks: int, seeds: range) -> None:
    assert_as_unsplit(pool, num_ranks, [random_case(seed, num_ranks) for seed in seeds])
