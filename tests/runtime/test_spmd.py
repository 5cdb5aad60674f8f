"""A stage on several ranks: fed and read as placed, with the unsplit model's gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, place, spmd
from rota.schedules import gpipe, one_f_one_b
from support.networks import Layer, batch_of, loss_fn
from support.parallel_modules import GatheredLayer, Normed, ParallelLayer, assert_equal_normed, normed_step
from support.pool import Pool

Ranks = list[tuple[int, ...]]
Edges = list[tuple[int, int]]
CHAIN: Edges = [(0, 1), (1, 2), (2, 3), (3, 4)]
ALL = (0, 1, 2, 3)


def stages_on(ranks: Ranks, edges: Edges, groups: dict[tuple[int, ...], spmd.Group]) -> Stages:
    """Parallel layers where a stage has several ranks; with no groups, the same unsplit."""
    modules: list[nn.Module] = []
    for stage, on in enumerate(ranks):
        torch.manual_seed(stage)
        kind = (ParallelLayer, GatheredLayer)[stage % 2]
        modules.append(Layer().double() if len(on) == 1 else kind(stage, groups.get(on)))
    return Stages(modules, edges)


def steps_on(rank: int, ranks: Ranks, edges: Edges, plan: Plan, batches: list[Any], tie: bool = False) -> list[Normed]:
    groups = {on: spmd.group(on) for on in dict.fromkeys(ranks)}
    stages = (tied_on if tie else stages_on)(ranks, edges, groups)
    with Pipeline(stages, plan, loss_fn) as pipeline:
        found = [normed_step(pipeline, *batch) for batch in batches]
        pipeline.timeline()
    return found


CASES: dict[str, tuple[Ranks, Edges]] = {
    "M": ([ALL, (0,), (1,), (2,), (3,)], CHAIN),
    "M with a head": ([ALL, (0,), (1,), (2,), ALL], CHAIN),
    "NN": ([ALL, (0,), ALL, (2,), (3,)], CHAIN),
    "K": ([(0,), (1,), (2,), (3,), ALL], [(0, 1), (2, 3), (1, 4), (3, 4)]),
    "rank by rank": ([(0, 1), (2, 3), (0, 1), (0, 1), (1,)], CHAIN),
    "first to all": ([(0, 1, 2), (3, 2), (0,), (2, 0), (1, 2, 0)], CHAIN),
    "the same in another order": ([(0, 1), (1, 0), (2, 3), (3,), (2, 3)], CHAIN),
    "several readers": ([(1, 2), (0,), (2,), (2, 0, 1), (0, 1)], [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)]),
}


@pytest.mark.parametrize(("case", "split"), [(case, i % 2 == 0) for i, case in enumerate(CASES)], ids=str)
def test_stages_on_several_ranks(pool: Pool, case: str, split: bool) -> None:
    ranks, edges = CASES[case]
    costs = Costs.uniform(5, weight_us=1 if split else None, recompute_us=(1, None, None, 1, None) if split else None)
    plan = gpipe(place(costs, Cluster.uniform(4), ranks, edges), 4)
    batches = [batch_of(4, seed) for seed in (1, 2)]
    by_rank = pool.run(4, steps_on, ranks, edges, plan, batches)
    serial = stages_on(ranks, edges, {})
    assert_equal_normed(by_rank, serial, batches, lambda rank, stage: sorted(ranks[stage]).index(rank))


def test_one_dropout_on_all_ranks_of_a_stage(pool: Pool) -> None:
    """Though each rank has a random state of its own."""
    drawn = pool.run(2, dropout_on, one_f_one_b(place(Costs.uniform(1), Cluster.uniform(2), [(0, 1)]), 4))
    assert drawn[0] == drawn[1]


TIES = {
    "other ranks": ([(0, 1), (1,), (2, 3)], None),
    "one more": ([(0, 1), (1,), (2, 3, 1)], r"'down' of stage 0 on \[0, 1\], 'down' of stage 2 on \[1, 2, 3\]"),
    "one rank with two TP shards": ([(0, 1), (0,), (1, 2)], "ranks that do not match one to one"),
}


@pytest.mark.parametrize("case", TIES)
def test_tied_parts(pool: Pool, case: str) -> None:
    ranks, refused = TIES[case]
    edges = CHAIN[:2]
    plan = gpipe(place(Costs.uniform(3), Cluster.uniform(4), ranks, edges), 4)
    if refused:
        with pytest.raises(PipelineError, match=refused):
            Pipeline(tied_on(ranks, edges, {}), plan, loss_fn)
        return
    batch = batch_of(4)
    by_rank = pool.run(4, steps_on, ranks, edges, plan, [batch], True)
    serial = tied_on(ranks, edges, {})
    assert_equal_normed(by_rank, serial, [batch], lambda rank, stage: sorted(ranks[stage]).index(rank))


def tied_on(ranks: Ranks, edges: Edges, groups: dict[tuple[int, ...], spmd.Group]) -> Stages:
    """The hidden weights of the first and the last stage are the same."""
    stages = stages_on(ranks, edges, groups)
    first, last = stages[0], stages[len(stages) - 1]
    first.down = last.down = min(first.down, last.down, key=Tensor.numel)  # a part, where this rank has one
    return stages


def dropout_on(rank: int, plan: Plan) -> dict[int, float]:
    torch.manual_seed(rank)
    stages = Stages([nn.Sequential(spmd.replicated(nn.Linear(6, 6)), nn.Dropout(0.5)).double()])
    with Pipeline(stages, plan, loss_fn) as pipeline:
        pipeline.step(*batch_of(4))
        return pipeline.losses
