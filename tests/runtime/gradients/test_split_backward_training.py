"""Plans with I and W, and with R, give the unsplit model's losses and gradients."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rota import Cluster, Costs, Pipeline, Plan, Stages, place
from rota.schedules import NAMED, gpipe
from support.core_strategies import deal, linear_extension
from support.networks import WIDTH, Layer, assert_as_unsplit, batch_of, chain, gradients_of, loss_fn
from support.pool import Pool
from support.sampling import IS_WHOLE

pytestmark = pytest.mark.dist

SPLIT = ("zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v")
WHOLE = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped_bfs", "hanayo")
OTHERS = (
    "varuna",
    "chimera",
    "dualpipe",
    "seq1f1b",
    "forward_only",
)  # R below; two streams in test_shared_weights; test_sequence_chunks; test_inference


def plan_for(schedule: str, num_ranks: int, num_microbatches: int) -> Plan:
    """A plan of the family on its own placement: one stage a rank, or two."""
    family = NAMED[schedule]
    costs = family.costs_from(Costs.uniform(num_ranks, 10, 10, weight_us=8, activation_bytes=8))
    return family(family.place(costs, Cluster.uniform(num_ranks)), num_microbatches)


def has(plan: Plan, kinds: str) -> bool:
    return {*kinds} == {str(task.kind) for task in plan.placement.tasks}


def test_no_family_is_left_out() -> None:
    assert {*SPLIT, *WHOLE, *OTHERS} == set(NAMED)


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(2, marks=pytest.mark.sweep), 3, pytest.param(4, marks=pytest.mark.sweep)]
)
def test_families(pool: Pool, num_ranks: int) -> None:
    sizes = (2 * num_ranks, 3 * num_ranks) if IS_WHOLE else (3 * num_ranks,)
    plans = [plan_for(name, num_ranks, m) for name in SPLIT for m in sizes]
    assert all(has(plan, "FIW") for plan in plans)
    plans += [plan_for("varuna", num_ranks, m) for m in (1, 2, 5)]
    assert has(plans[-1], "FBR")
    plans += [plan_for(name, num_ranks, m) for name in ("gpipe", "1f1b") for m in (1, 2)]
    plans += [plan_for(name, num_ranks, m) for name in WHOLE for m in sizes]
    assert has(plans[-1], "FB")
    cases = [(chain(plan.num_stages), plan, [batch_of(plan.num_microbatches, s) for s in (1, 2)]) for plan in plans]
    assert_as_unsplit(pool, num_ranks, cases)


# --- stages of all sorts ----------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Integers come in: there is no gradient of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        tokens = (x * 3).long() % 7
        return {"x": (self.table(tokens).sum(1), None), "tokens": tokens, "n": 2}


class Adapted(nn.Module):
    """A frozen layer with a low-rank one beside it, in a block that is checkpointed."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.base.requires_grad_(False)
        self.checkpointed, self.calls = checkpointed, 0

    def block(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.base(x) + self.up(torch.relu_(self.down(x))))

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        (x, nothing), tokens, n = value["x"], value["tokens"], value["n"]
        y: Tensor = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return {"x": (y * n, nothing), "tokens": tokens, "n": n}


class Twice(nn.Module):
    """A layer that is used twice, then the number of tokens that were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, value: dict[str, Any]) -> Tensor:
        x = nn.functional.leaky_relu(value["x"][0], inplace=True)
        y: Tensor = self.layer(torch.sigmoid(self.layer(x)))
        return y + value["tokens"].sum(1, keepdim=True)


def odd_stages(frozen: tuple[int, ...] = (), checkpointed: bool = True) -> Stages:
    torch.manual_seed(0)
    stages = Stages([module.double() for module in (Tokens(), Adapted(checkpointed), Adapted(False), Twice())])
    for stage in frozen:
        stages[stage].requires_grad_(False)
    return stages


def odd_plans() -> list[Plan]:
    """I and W in any order on 3 ranks, two stages on one of them; without R, and with R for some stages."""
    rng, plans = random.Random(1), []
    for ranks in ([0, 1, 2, 0], [1, 1, 0, 2]):
        for recompute in (None, (1, 1, 1, None), (None, 1, None, None)):
            costs = Costs.uniform(4, 2, 2, weight_us=1, recompute_us=recompute)
            placement = place(costs, Cluster.uniform(3), ranks)
            plans += [deal(placement, 3, linear_extension(placement, 3, rng, in_order=False)) for _ in range(2)]
    return plans


@pytest.mark.parametrize("frozen", [(), (0,), (0, 1), (0, 1, 2), (1, 3), (0, 1, 2, 3)])
def test_odd_stages(pool: Pool, frozen: tuple[int, ...]) -> None:
    cases = [(odd_stages(frozen), plan, [batch_of(plan.num_microbatches)] * 2) for plan in odd_plans()]
    assert_as_unsplit(pool, 3, cases)


# --- recomputation ----------------------------------------------------------------------------------------------------


def normed_stages() -> Stages:
    """Dropout, statistics of the micro-batch, and a weight whose norm is estimated step by step in the forward."""
    torch.manual_seed(2)
    modules = [
        nn.Sequential(
            torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
            nn.BatchNorm1d(WIDTH),
            nn.Dropout(0.3),
            nn.Linear(WIDTH, WIDTH),
        ).double()
        for _ in range(3)
    ]
    return Stages(modules)


Seen = tuple[list[float], dict[Any, Tensor], dict[Any, Tensor]]


def losses_gradients_and_buffers(rank: int, plan: Plan) -> Seen:
    torch.manual_seed(5)
    stages = normed_stages()
    with Pipeline(stages, plan, loss_fn) as pipeline:
        losses = [pipeline.step(*batch_of(4, seed)) for seed in (1, 2)]
    buffers = {(stage, n): b for stage in pipeline.local_stages for n, b in stages[stage].named_buffers()}
    return losses, gradients_of(stages, pipeline.local_stages), buffers


def test_recomputation_repeats_dropout_and_leaves_buffers(pool: Pool) -> None:
    """The plans differ in R and in I and W alone, so all that they compute is the same to the bit."""
    results = []
    for more in ({}, {"recompute_us": 1}, {"recompute_us": (1, None, None)}, {"weight_us": 1, "recompute_us": 1}):
        placement = place(Costs.uniform(3, **more), Cluster.uniform(3))  # type: ignore[arg-type]
        results.append(pool.run(3, losses_gradients_and_buffers, gpipe(placement, 4)))
    for by_rank in results[1:]:
        for found, expected in zip(by_rank, results[0], strict=True):
            assert found[0] == expected[0]
            torch.testing.assert_close(found[1:], expected[1:], rtol=1e-12, atol=1e-12)
    batches_seen = [buffers[rank, "1.num_batches_tracked"] for rank, (_, _, buffers) in enumerate(results[1])]
    assert batches_seen == [8, 8, 8]
