"""Batches of any shape, from step to step: weighted as they should be, and known shapes are not told again."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from dist.networks import StepResult, assert_equal_steps, batch_of, chain, gradients_of, loss_fn, serial_step
from dist.pool import Pool
from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, place
from rota.runtime.program import Message
from rota.runtime.transport import Transport
from rota.schedules import NAMED

WIDTH = 6


def plan_for(num_microbatches: int, schedule: str = "1f1b") -> Plan:
    return NAMED[schedule](place(Costs.uniform(3), Cluster.uniform(3)), num_microbatches)


def tensors(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn((2, *shape, WIDTH), generator=generator, dtype=torch.float64).unbind()
    return inputs, targets


def steps_told(rank: int, stages: Stages, plan: Plan, batches: list[Any], **options: Any) -> Any:
    """Each step's result, and whether layouts were sent ahead in it; only those who need it are given the batch."""
    results, told, post = [], [], Transport.post

    def noted_post(transport: Transport, message: Message, with_layout: bool) -> None:
        told.append((len(results), with_layout))
        post(transport, message, with_layout)

    loss = options.pop("loss", loss_fn)
    with patch.object(Transport, "post", noted_post), Pipeline(stages, plan, loss, **options) as pipeline:
        for inputs, targets in batches:
            for parameter in pipeline.parameters():
                parameter.grad = None
            mean = pipeline.step(inputs if rank == 0 else None, targets if rank == 2 else None)
            results.append(StepResult(mean, gradients_of(stages, pipeline.local_stages)))
    fresh = [{flag for step, flag in told if step == number} for number in range(len(results))]
    assert all(len(flags) == 1 for flags in fresh)  # never told for some messages alone
    return results, [True in flags for flags in fresh]


def check_steps(pool: Pool, plan: Plan, batches: list[Any], serial: list[Any], fresh: list[bool]) -> None:
    by_rank = pool.run(3, steps_told, chain(3), plan, batches)
    for step, batch in enumerate(serial):
        assert_equal_steps([results[step] for results, _ in by_rank], serial_step(chain(3), *batch))
    assert all(told == fresh for _, told in by_rank)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_ragged_microbatches_are_weighted_by_examples(pool: Pool, schedule: str) -> None:
    batches, whole = [], []
    for step, sizes in enumerate([[3, 1, 5, 2], [3, 1, 5, 2], [1, 5, 2, 3], [4, 4, 4, 4]]):
        x, target = tensors(sum(sizes), seed=step)
        batches.append(([*x.split(sizes)], [*target.split(sizes)]))
        whole.append((x, target))
    check_steps(pool, plan_for(4, schedule), batches, whole, fresh=[True, False, True, True])


def test_shapes_may_change_from_step_to_step_and_back(pool: Pool) -> None:
    shapes = [(8,), (8,), (8, 3), (8, 5), (16, 5), (16, 5), (8,), (8,)]
    batches = [tensors(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    fresh = [True, False, True, True, True, False, True, False]
    check_steps(pool, plan_for(4), batches, batches, fresh)


class PairInTraining(nn.Module):
    """In training its boundary carries a pair, otherwise one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Any) -> Any:
        x = x[0] + x[1] if isinstance(x, tuple) else x
        return (self.linear(x), x) if self.training else self.linear(x)


class Sum(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return x[0] + x[1] if isinstance(x, tuple) else x


def steps_in_modes(rank: int, stages: Stages, plan: Plan, batch: Any, modes: list[bool]) -> list[StepResult]:
    results = []
    with Pipeline(stages, plan, loss_fn) as pipeline:
        for training in modes:
            stages[1].train(training)  # what the other ranks do not know
            for parameter in pipeline.parameters():
                parameter.grad = None
            results.append(StepResult(pipeline.step(*batch), gradients_of(stages, pipeline.local_stages)))
    return results


def test_train_and_eval_between_steps(pool: Pool) -> None:
    stages = Stages([PairInTraining(), PairInTraining(), Sum()])
    batch, modes = tensors(8), [True, True, False, False, True]
    by_rank = pool.run(3, steps_in_modes, stages, plan_for(4), batch, modes)
    for step, training in enumerate(modes):
        stages[1].train(training)
        for module in stages.modules:
            module.zero_grad(set_to_none=True)
        assert_equal_steps([results[step] for results in by_rank], serial_step(stages, *batch))


class Keep(nn.Module):
    """Keeps the rows whose sum is positive: how many is known only when they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        kept = x[x.sum(1) > 0]
        return self.linear(kept), len(kept)


class Use(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, kept: tuple[Tensor, int]) -> tuple[Tensor, int]:
        return torch.tanh(self.linear(kept[0])), kept[1]


def kept_loss(output: tuple[Tensor, int], target: Tensor) -> Tensor:
    return ((output[0].sum(0) / (output[1] + 1) - target.mean(0)) ** 2).mean()


def test_shapes_may_depend_on_the_data(pool: Pool) -> None:
    torch.manual_seed(1)
    stages, batches = Stages([Keep(), Use(), Use()]), [tensors(12, seed=seed) for seed in range(4)]
    batches[1][0][:3].abs_().neg_()  # a micro-batch of which nothing is kept
    by_rank = pool.run(3, dynamic_steps, stages, plan_for(4), batches)
    for step, (x, target) in enumerate(batches):
        for module in stages.modules:
            module.zero_grad(set_to_none=True)
        parts = zip(x.chunk(4), target.chunk(4), strict=True)
        loss = sum((kept_loss(stages.run(x), target) for x, target in parts), torch.tensor(0.0)) / 4
        loss.backward()
        serial = StepResult(loss.item(), gradients_of(stages, range(3)))
        assert_equal_steps([results[step] for results, _ in by_rank], serial)


def dynamic_steps(rank: int, stages: Stages, plan: Plan, batches: list[Any]) -> Any:
    return steps_told(rank, stages, plan, batches, loss=kept_loss, dynamic_shapes=True)


def mend_the_batch(rank: int, stages: Stages, plan: Plan, batch: Any) -> Any:
    """Rank 0 gives batches that do not fit, hears so, and does better; the others wait meanwhile."""
    heard = []
    x, targets = batch
    with Pipeline(stages, plan, loss_fn) as pipeline:
        wrong = {0: [(x[:-1], None), ([x], None), (None, None)], 2: [(None, targets[:-1]), (None, None)]}
        for inputs, target in wrong.get(rank, []):
            with pytest.raises(PipelineError) as error:
                pipeline.step(inputs, target)
            heard.append(str(error.value))
        result = StepResult(pipeline.step(*batch), {})
        result.gradients = gradients_of(stages, pipeline.local_stages)
    return result, heard


def test_batch_that_does_not_fit_is_refused_before_anything_is_sent(pool: Pool) -> None:
    batch = batch_of(4)
    by_rank = pool.run(3, mend_the_batch, chain(3), plan_for(4), batch)
    assert_equal_steps([result for result, _ in by_rank], serial_step(chain(3), *batch))
    undivided, few, none = by_rank[0][1]
    assert "inputs has 19 rows (shape [19, 6]), which do not divide into 4 micro-batches; give 16 or 20" in undivided
    assert "inputs is a list of 1 micro-batches, but the plan has 4" in few
    assert "rank 0 holds stage 0, which reads the step's inputs [0], but got inputs=None" in none
    undivided, none = by_rank[2][1]
    assert "targets has 19 rows" in undivided
    assert "rank 2 holds the last stage, but got targets=None" in none
