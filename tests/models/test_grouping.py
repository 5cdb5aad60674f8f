"""Stages made by hand, of which neighbours become one: the same values, names and gradients, whatever is grouped."""

from __future__ import annotations

import copy
import pickle
from itertools import combinations

import pytest
import torch
from torch import nn

from models.test_stages import diamond
from rota import SplitError, Stages, split
from support.networks import batch_of, graph_of_layers

SKIPS = [(0, 1), (0, 2), (1, 2), (1, 4), (2, 3), (0, 3), (3, 4)]
CUTS = [cuts for number in range(5) for cuts in combinations(range(1, 5), number)]


@pytest.mark.parametrize("cuts", CUTS)
def test_any_groups_of_a_dag_compute_the_same(cuts: tuple[int, ...]) -> None:
    stages, (x, _) = graph_of_layers(5, SKIPS), batch_of(1)
    expected = stages.run(x)
    fewer = split(stages, len(cuts) + 1, cuts)
    assert len(fewer) == len(cuts) + 1
    assert fewer.cuts == tuple(map(str, cuts))
    for again in (fewer, Stages(copy.deepcopy(fewer.modules), fewer.edges, fewer.inputs)):
        assert torch.equal(again.run(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(fewer)).run(x), expected)
    assert {name for name, _ in fewer.named_parameters()} == {
        f"{stage}.{name}" for stage in range(5) for name, _ in stages[stage].named_parameters()
    }
    assert {p for _, p in fewer.named_parameters()} == {p for module in stages.modules for p in module.parameters()}


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (3,), (1, 3), (1, 2, 3)])
def test_inputs_defaults_and_keys(cuts: tuple[int, ...]) -> None:
    stages, x, mask = diamond(), torch.randn(5, 4), torch.rand(5, 3)
    fewer = split(stages, len(cuts) + 1, cuts)
    assert torch.equal(fewer.run({"x": x, "mask": mask}), stages.run({"x": x, "mask": mask}))
    assert torch.equal(fewer.run((x, mask, 3.0)), stages.run((x, mask, 3.0)))
    assert fewer.inputs[-1] == (("x", "mask", "scale") if not cuts else ("mask", "scale"))


def test_refusals() -> None:
    stages = Stages([nn.Linear(2, 2) for _ in range(3)])
    with pytest.raises(SplitError, match="4 stages need 3 cuts, but there are 2 possible ones"):
        split(stages, 4)
    with pytest.raises(SplitError, match="cuts has 3, which is not a possible cut"):
        split(stages, 2, [3])
    with pytest.raises(SplitError, match="edge 1 -> 0 leads back"):
        split(Stages([nn.Linear(2, 2), nn.Linear(2, 2)], [(1, 0)]), 2)
