"""`Pipeline(recompute=…)`: backwards that run their stage's forward again give the same as those that kept it all."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rota import Cluster, Costs, Kind, Pipeline, PipelineError, Plan, Stages, bidirectional, place
from rota.runtime.gradients.forward_backward import StageForward
from rota.runtime.gradients.recompute import drawing_again, without_activations
from rota.schedules import NAMED, chimera, forward_only, gpipe
from support.networks import WIDTH, batch_of, gradients_of, loss_fn, plan_for, refusal
from support.odd_stages import Calls
from support.pool import Pool, on_ranks

NUM_MICROBATCHES = 4


class Layers(nn.Module):
    """Dropout, statistics of the micro-batch, and much to keep; counts its forwards."""

    def __init__(self, with_statistics: bool = True) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(40 * WIDTH) if with_statistics else nn.LayerNorm(40 * WIDTH)
        last = nn.Linear(40 * WIDTH, WIDTH)
        if with_statistics:  # and a weight whose norm is estimated step by step in the forward
            last = nn.utils.parametrizations.spectral_norm(last)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 40 * WIDTH), norm, nn.Dropout(0.3), last)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.layers(x)
        return y


def make_stages(num_stages: int, with_statistics: bool = True) -> Stages:
    torch.manual_seed(4)
    return Stages([Layers(with_statistics).double() for _ in range(num_stages)])


Seen = tuple[list[float], dict[Any, Tensor], dict[Any, Tensor], dict[int, int]]


def seen_by(rank: int, plan: Plan, recompute: str | list[int], with_statistics: bool = True) -> tuple[Seen, int]:
    """Losses, gradients, buffers and calls of two steps and an evaluation; the most bytes kept in another step."""
    num_stages = plan.num_stages
    stages = make_stages(num_stages, with_statistics)
    torch.manual_seed(5)
    with Pipeline(stages, plan, loss_fn, recompute=recompute) as pipeline:
        losses = [pipeline.step(*batch_of(NUM_MICROBATCHES, seed)) for seed in (1, 2)]
        local = pipeline.local_stages
        gradients = gradients_of(pipeline.stages, local)
        buffers = {(s, name): b.clone() for s in local for name, b in local[s].named_buffers()}
        calls = {s: int(local[s].calls) for s in local}  # type: ignore[arg-type]
        losses.append(pipeline.evaluate(*batch_of(NUM_MICROBATCHES, 3)))
        with pipeline.watch_memory() as watch:
            pipeline.step(*batch_of(NUM_MICROBATCHES, 4))
    return (losses, gradients, buffers, calls), watch.most_held_bytes


def compare(pool: Pool, num_ranks: int, plan: Plan, recompute: str | list[int], recomputed: Iterable[int]) -> None:
    """The same to the bit, twice as many calls of the stages that are `recomputed`, less kept between F and B."""
    kept = pool.run(num_ranks, seen_by, plan, "none")
    again = pool.run(num_ranks, seen_by, plan, recompute)
    for (found, least), (expected, most) in zip(again, kept, strict=True):
        assert found[0] == expected[0]
        torch.testing.assert_close(found[1:3], expected[1:3], rtol=0, atol=0)
        assert found[3] == {s: n * 2 if s in recomputed else n for s, n in expected[3].items()}
        if all(s in recomputed and plan.placement.task(s, Kind.B) for s in found[3]):
            assert least < 0.6 * most


def test_recomputation_by_the_plan(pool: Pool) -> None:
    """The plans differ in R and in I and W alone, so all that they compute is the same to the bit."""
    options = ({}, {"recompute_us": 1}, {"recompute_us": (1, None, None)}, {"weight_us": 1, "recompute_us": 1})
    kept, *others = (pool.run(3, seen_by, plan_for(3, "gpipe", **costs), "none") for costs in options)
    for again in others:
        for (found, _), (expected, _) in zip(again, kept, strict=True):
            assert found[0] == expected[0]
            torch.testing.assert_close(found[1:3], expected[1:3], rtol=1e-12, atol=1e-12)


def test_whole_backwards(pool: Pool) -> None:
    compare(pool, 2, plan_for(2), "full", range(2))


def test_split_backwards_and_some_stages(pool: Pool) -> None:
    plan = NAMED["zb_h1"](place(Costs.uniform(3, 10, 10, weight_us=10), Cluster.uniform(3)), NUM_MICROBATCHES)
    compare(pool, 3, plan, [0, 2], [0, 2])


def test_beside_stages_that_the_plan_recomputes(pool: Pool) -> None:
    costs = Costs.uniform(2, 10, 10, weight_us=10, recompute_us=(10, None))
    plan = gpipe(place(costs, Cluster.uniform(2)), NUM_MICROBATCHES)
    (first, _), (second, _) = pool.run(2, seen_by, plan, [1])
    assert (first[3], second[3]) == ({0: 16}, {1: 16})
    compare(pool, 2, plan, [1], [1])


def test_each_copy_of_a_stage_is_recomputed(pool: Pool) -> None:
    plan = chimera(bidirectional(Costs.uniform(2, 10, 20), Cluster.uniform(2)), NUM_MICROBATCHES)
    kept, again = (pool.run(2, seen_by, plan, how, False) for how in ("none", [1]))
    for (found, _), (expected, _) in zip(again, kept, strict=True):
        assert found[0] == expected[0]
        torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-12)
    # The plan's stages 1 and 3 are copies of the model's stage 1; each sees two of four micro-batches.
    assert [seen[3] for seen, _ in again] == [{0: 4, 3: 8}, {1: 8, 2: 4}]


@pytest.mark.parametrize(
    ("recompute", "told"),
    [
        ("full", "recompute='full' names stage 1, which the plan recomputes by R already; name the others alone"),
        ([0, 1], "recompute=[0, 1] names stage 1, which the plan recomputes by R already"),
        ([0, 2], "recompute has stage 2, but the model has stages 0 to 1"),
        ("all", "recompute='all'; say 'none', 'full' or give a list of stages"),
    ],
)
@on_ranks(1)
def test_what_is_refused(rank: int, recompute: Any, told: str) -> None:
    plan = gpipe(place(Costs.uniform(2, recompute_us=(None, 10)), Cluster.uniform(1), [0, 0]), NUM_MICROBATCHES)
    assert told in refusal(Pipeline, make_stages(2), plan, loss_fn, recompute=recompute)


def forwards(rank: int, plan: Plan) -> int:
    stages = make_stages(2)
    with Pipeline(stages, plan, loss_fn, recompute="full") as pipeline:
        pipeline.step(*batch_of(NUM_MICROBATCHES))
    return int(stages[rank].calls)  # type: ignore[arg-type]


def test_a_plan_of_forwards_has_nothing_to_recompute(pool: Pool) -> None:
    plan = forward_only(place(Costs.uniform(2), Cluster.uniform(2)).forward_only(), NUM_MICROBATCHES)
    assert pool.run(2, forwards, plan) == [NUM_MICROBATCHES] * 2


def test_differentiating_inside_is_refused() -> None:
    force = Calls(lambda _, x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0])
    stages, x = Stages([force], inputs=[()]), torch.ones(2, requires_grad=True)
    with (
        pytest.raises(PipelineError, match="differentiates inside its forward; plan without recomputation"),
        without_activations(stages[0], [x], (), "stage 0"),
    ):
        StageForward(stages, 0)([x], ())


class DropsLayers(nn.Module):
    """By Python's, NumPy's and its own generators; PyTorch's is seeded by whoever runs a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(12))
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            drawn = (random.random, np.random.rand, lambda: torch.rand((), generator=self.generator).item())[i % 3]()
            if drawn < 0.5:
                x = layer(x)
        return x


def test_what_was_drawn_is_drawn_again() -> None:
    torch.manual_seed(0)
    module, x = DropsLayers(), torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    stages = Stages([module], inputs=[()])
    for _ in range(5):
        with without_activations(module, [x], (), "stage 0") as again:
            first, _, _ = StageForward(stages, 0)([x], ())
        StageForward(stages, 0)([x], ())  # another micro-batch draws meanwhile
        now = random.getstate(), module.generator.get_state()
        with drawing_again(module, again):
            second, _, _ = StageForward(stages, 0)(again.received, ())
        assert torch.equal(first, second)
        assert random.getstate() == now[0]
        assert torch.equal(module.generator.get_state(), now[1])
