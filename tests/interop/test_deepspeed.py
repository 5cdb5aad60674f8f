"""DeepSpeed's boundaries, and its order."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from torch import nn

from rota import Cluster, Costs, RotaError, ScheduleError, SplitError, place
from rota.compat.deepspeed import schedule as ds, to_plan
from rota.compat.deepspeed.layers import partition
from rota.cutting import by_regex
from rota.interop import deepspeed
from rota.schedules import NAMED


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
def test_boundaries_are_read_as_written(counts: list[int]) -> None:
    boundaries = tuple(sum(counts[:part]) for part in range(len(counts) + 1))
    text = deepspeed.write_boundaries(boundaries)
    assert deepspeed.read_boundaries(text) == boundaries


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[0, 4,", "not JSON: "),
        ('{"parts": [0, 4]}', "boundaries is"),
        ("[0, true]", "boundaries[1] is true"),
        ("[0, 0]", "must begin with 0 and end with the number of layers"),
        ("[0, 5, 4]", "fall from 5 to 4 at entry 2; sort them"),
        (f"[0, {'1, ' * 400_000}1]", "10,000 at most"),
    ],
)
def test_what_are_no_boundaries(text: str, told: str) -> None:
    with pytest.raises(RotaError, match=re.escape(told)):
        deepspeed.read_boundaries(text)


def test_layers_of_a_type_are_shared_out_as_the_door_does() -> None:
    layers = [nn.Embedding(4, 2), *(nn.Linear(2, 2) if i % 2 else nn.ReLU() for i in range(14)), nn.LayerNorm(2)]
    names = [type(layer).__name__ for layer in layers]
    for num_parts in (1, 2, 3, 4):
        for pattern in ("linear", "^relu$", "l"):
            boundaries = by_regex(names, pattern, num_parts)
            assert boundaries == partition(layers, f"type:{pattern}", num_parts, None)
            counts = [len(re.findall("Linear", " ".join(names[a:b]))) for a, b in pairwise(boundaries)]
            assert pattern != "linear" or max(counts) - min(counts) <= 1
    with pytest.raises(SplitError, match="pattern 'conv' matches none of the layers, which are Embedding, ReLU, Line"):
        by_regex(names, "conv", 2)
    with pytest.raises(SplitError, match=re.escape("pattern '(' is not a regular expression")):
        by_regex(names, "(", 2)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 4), (4, 8), (4, 2)])
def test_the_plan_is_what_deepspeed_does(num_stages: int, num_microbatches: int) -> None:
    boundaries = [3 * stage for stage in range(num_stages + 1)]
    plan = deepspeed.plan_of(boundaries, Costs.uniform(3 * num_stages, 5, 7), num_microbatches)
    assert plan.orders == to_plan(ds.TrainSchedule, num_microbatches, num_stages).orders
    assert {task.duration_us for task in plan.placement.tasks} == {15, 21}
    assert deepspeed.runs_in_this_order(plan)
    assert deepspeed.boundaries_for(plan, boundaries) == tuple(boundaries)
    assert deepspeed.is_uniform(boundaries)


def test_plans_that_deepspeed_cannot_have() -> None:
    plan = NAMED["gpipe"](place(Costs.uniform(4), Cluster.uniform(2), [0, 1, 0, 1]), 2)
    with pytest.raises(ScheduleError, match="needs a chain of stages"):
        deepspeed.boundaries_for(plan, [0, 1, 2, 3, 4])
    plan = NAMED["gpipe"](place(Costs.uniform(2), Cluster.uniform(2)), 2)
    assert not deepspeed.runs_in_this_order(plan)
    with pytest.raises(SplitError, match="make 3 parts for 2 stages"):
        deepspeed.boundaries_for(plan, [0, 1, 2, 3])
    assert not deepspeed.is_uniform([0, 1, 4])
