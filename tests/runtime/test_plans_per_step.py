"""A plan of its own for each step: micro-batches of any sizes and number, in any order, against the unsplit model."""

import random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rota import Cluster, Costs, Pipeline, Plan, place
from rota.schedules import NAMED
from support.core_strategies import deal, linear_extension
from support.networks import StepResult, assert_equal_steps, cleared_step, gradients_of, refusal
from support.pool import Pool
from support.text_models import IGNORED, LONGEST, gpt_stages, samples, step_by_sample, summed_loss

Lengths = list[list[int]]  # of the samples in each micro-batch


def padded(group: list[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(len(sample) for sample in group) - 1
    words, labels = torch.zeros(len(group), longest, dtype=torch.int64), torch.full((len(group), longest), IGNORED)
    for row, sample in enumerate(group):
        words[row, : len(sample) - 1], labels[row, : len(sample) - 1] = sample[:-1], sample[1:]
    return words, labels


def grouped(lengths: Lengths, seed: int) -> tuple[list[Tensor], list[Tensor], list[tuple[int, int]]]:
    """Inputs, targets and sizes of micro-batches whose samples have these lengths."""
    flat = iter(samples([length for group in lengths for length in group], seed))
    pairs = [padded([next(flat) for _ in group]) for group in lengths]
    return [x for x, _ in pairs], [y for _, y in pairs], [(len(group), max(group)) for group in lengths]


def random_lengths(rng: random.Random) -> Lengths:
    return [[rng.randint(1, LONGEST) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(2, 7))]


def random_orders(rng: random.Random, base: Plan, num_microbatches: int) -> Plan:
    """The micro-batches in any order, which need not be the same on all ranks."""
    return deal(base.placement, num_microbatches, linear_extension(base.placement, num_microbatches, rng, False))


def base_plan(num_ranks: int, *, in_two: bool = False) -> Plan:
    costs = Costs.uniform(num_ranks, 10, 20, weight_us=10 if in_two else None, boundary_bytes=100)
    return NAMED["zb_h1" if in_two else "1f1b"](place(costs, Cluster.uniform(num_ranks)), 4)


def steps(rank: int, base: Plan, batches: list[tuple[Lengths, Plan | None]]) -> list[Any]:
    """For each batch the step's result, the loss in evaluation, and whether the timeline has the plan's orders."""
    results = []
    with Pipeline(gpt_stages(base.num_ranks), base, summed_loss, check_data="never") as pipeline:
        for seed, (lengths, plan) in enumerate(batches):
            inputs, targets, sizes = grouped(lengths, seed)
            own_batch = {} if plan is None else {"plan": plan, "sizes": sizes}
            if seed % 2 and plan is not None:
                pipeline.prepare(plan, sizes)
            evaluated = pipeline.evaluate(inputs, targets, **own_batch)
            result = cleared_step(pipeline, inputs, targets, **own_batch)
            results.append((result, evaluated, pipeline.timeline().plan.orders == (plan or base).orders))
    return results


def test_each_step_has_its_own_plan(pool: Pool) -> None:
    rng, base = random.Random(7), base_plan(4, in_two=True)
    batches: list[tuple[Lengths, Plan | None]] = []
    for _ in range(12):
        lengths = random_lengths(rng)
        batches.append((lengths, random_orders(rng, base, len(lengths))))
    batches.insert(6, ([[5, 3], [9], [2, 2], [4]], None))  # the pipeline's own plan, in between
    by_rank = pool.run(4, steps, base, batches)
    for i, (lengths, _) in enumerate(batches):
        whole = step_by_sample(4, samples([length for group in lengths for length in group], i))
        assert_equal_steps([of_rank[i][0] for of_rank in by_rank], whole)
        assert all(
            abs(evaluated - whole.loss) < 1e-10 and is_planned
            for _, evaluated, is_planned in (of_rank[i] for of_rank in by_rank)
        )


def mean_loss(output: Tensor, labels: Tensor) -> Tensor:
    """The mean over rows of each row's mean, so that rows weigh alike whatever their lengths."""
    losses = functional.cross_entropy(output.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return (losses.sum(1) / (labels != IGNORED).sum(1)).mean()


def mean_steps(rank: int, base: Plan, batches: list[tuple[Lengths, Plan]]) -> list[StepResult]:
    """Only the first rank gives inputs, and only the last one targets."""
    results = []
    with Pipeline(gpt_stages(2), base, mean_loss, check_data="never") as pipeline:
        for seed, (lengths, plan) in enumerate(batches):
            inputs, targets, sizes = grouped(lengths, seed)
            own_batch = (inputs if rank == 0 else None, targets if rank == 1 else None)
            results.append(cleared_step(pipeline, *own_batch, plan=plan, sizes=sizes))
    return results


def test_means_weigh_by_the_rows_of_the_plan(pool: Pool) -> None:
    rng, base = random.Random(5), base_plan(2)
    batches = [(lengths, random_orders(rng, base, len(lengths))) for lengths in (random_lengths(rng) for _ in range(5))]
    by_rank = pool.run(2, mean_steps, base, batches)
    for i, (lengths, _) in enumerate(batches):
        stages = gpt_stages(2)
        flat = [length for group in lengths for length in group]
        words, labels = padded(samples(flat, i))
        loss = mean_loss(stages.run(words), labels)
        loss.backward()
        assert_equal_steps([of[i] for of in by_rank], StepResult(loss.item(), gradients_of(stages, range(2))))


def refused(rank: int, base: Plan, plans: list[Plan], sizes: list[Any]) -> list[str]:
    messages = []
    with Pipeline(gpt_stages(2), base, summed_loss) as pipeline:
        inputs, targets, right = grouped([[3, 4], [7], [2]], 0)
        for plan, size in zip(plans, sizes, strict=True):
            own_plan = plan[rank] if isinstance(plan, list) else plan
            own_batch = right if size is None else size[rank]
            messages.append(refusal(pipeline.step, inputs, targets, plan=own_plan, sizes=own_batch))
    return messages


def test_refusals(pool: Pool) -> None:
    rng, base = random.Random(3), base_plan(2)
    first, second = random_orders(rng, base, 3), NAMED["gpipe"](base.placement, 3)
    assert first.orders != second.orders
    right = [(2, 4), (1, 7), (1, 2)]
    cases: list[tuple[Any, Any]] = [
        ([first, second], None),
        (first, [right, [(2, 4), (1, 7), (1, 3)]]),
        (first, [right[:2], right[:2]]),
        (first, [[(2, 4), (1, 7), (1, 2.5)]] * 2),
        (base_plan(2, in_two=True), None),
        (None, [right, right]),
    ]
    for messages in pool.run(2, refused, base, [plan for plan, _ in cases], [size for _, size in cases]):
        assert "rank 1 has another plan for this step than rank 0, or other sizes" in messages[0]
        assert "rank 1 has another plan for this step than rank 0, or other sizes" in messages[1]
        assert "sizes has 2 entries for 3 micro-batches" in messages[2]
        assert "sizes[2] is (1, 2.5)" in messages[3]
        assert "where the pipeline's plan has" in messages[4]
        assert "sizes are given without a plan" in messages[5]
