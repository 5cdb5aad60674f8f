"""Plans with I and W, and with R, give the unsplit model's losses and gradients."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rota import Cluster, Costs, Plan, Stages, place
from rota.schedules import NAMED
from support.core_strategies import deal, linear_extension
from support.networks import WIDTH, Layer, assert_as_unsplit, batch_of, chain
from support.pool import Pool
from support.sampling import IS_WHOLE, swept

SPLIT = ("zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v")
WHOLE = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped_bfs", "hanayo")
#: R is below, two streams are in test_shared_weights, others in test_sequence_chunks and test_inference.
OTHERS = ("varuna", "chimera", "dualpipe", "seq1f1b", "forward_only")


def plan_for(schedule: str, num_ranks: int, num_microbatches: int) -> Plan:
    """A plan of the family on its own placement: one stage a rank, or two."""
    family = NAMED[schedule]
    costs = family.costs_from(Costs.uniform(num_ranks, 10, 10, weight_us=8, activation_bytes=8))
    return family(family.place(costs, Cluster.uniform(num_ranks)), num_microbatches)


def has(plan: Plan, kinds: str) -> bool:
    return {*kinds} == {str(task.kind) for task in plan.placement.tasks}


def test_no_family_is_left_out() -> None:
    assert {*SPLIT, *WHOLE, *OTHERS} == set(NAMED)


@pytest.mark.parametrize("num_ranks", [swept(2), 3, swept(4)])
def test_families(pool: Pool, num_ranks: int) -> None:
    sizes = (2 * num_ranks, 3 * num_ranks) if IS_WHOLE else (2 * num_ranks,)
    plans = [plan_for(name, num_ranks, m) for name in SPLIT for m in sizes]
    assert all(has(plan, "FIW") for plan in plans)
    plans += [plan_for("varuna", num_ranks, m) for m in (1, 2, 5)]
    assert has(plans[-1], "FBR")
    plans += [plan_for(name, num_ranks, m) for name in ("gpipe", "1f1b") for m in (1, 2)]
    plans += [plan_for(name, num_ranks, m) for name in WHOLE for m in sizes]
    assert has(plans[-1], "FB")
    cases = [(chain(plan.num_stages), plan, [batch_of(plan.num_microbatches, s) for s in (1, 2)]) for plan in plans]
    assert_as_unsplit(pool, num_ranks, cases)


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


@pytest.mark.parametrize("frozen", [(1, 3), (0, 1, 2, 3)])
def test_odd_stages(pool: Pool, frozen: tuple[int, ...]) -> None:
    cases = [(odd_stages(frozen), plan, [batch_of(plan.num_microbatches)] * 2) for plan in odd_plans()]
    assert_as_unsplit(pool, 3, cases)
