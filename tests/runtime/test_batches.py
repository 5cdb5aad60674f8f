"""Batches of any shape, from step to step: weighted as they should be, and known shapes are not told again."""

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rota
from rota import Pipeline, Plan, Stages
from support.fresh import run_fresh
from support.networks import (
    StepResult,
    assert_equal_steps,
    batch_of,
    chain,
    clear,
    cleared_step,
    gradients_of,
    loss_fn,
    plan_for,
    refusal,
    serial_microbatches,
    serial_step,
    stages_of,
)
from support.odd_stages import Calls
from support.pool import Pool, on_ranks

WIDTH = 6


def tensors(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn((2, *shape, WIDTH), generator=generator, dtype=torch.float64).unbind()
    return inputs, targets


def mean_or_zero(output: Tensor, target: Tensor) -> Tensor:
    """Also of no rows."""
    return loss_fn(output, target) if len(output) else output.sum() * 0


def steps_of(rank: int, stages: Stages, batches: list[Any], loss: Any, **options: Any) -> list[StepResult]:
    """Only the ranks that need a batch get it."""
    with Pipeline(stages, plan_for(3), loss, **options) as pipeline:
        return [cleared_step(pipeline, x if rank == 0 else None, y if rank == 2 else None) for x, y in batches]


def test_shapes_may_change_from_step_to_step_and_back(pool: Pool) -> None:
    """Whole batches, and lists of uneven micro-batches, which are weighted by their examples."""
    shapes = [(8,), (8,), (8, 3), (8, 5), (16, 5), (16, 5), (8,), (8,)]
    whole = [tensors(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    batches: list[Any] = [*whole]
    for sizes in ([3, 1, 5, 2], [3, 1, 5, 2], [1, 5, 2, 3], [4, 4, 4, 4], [4, 0, 5, 1]):
        whole.append(tensors(sum(sizes), seed=len(whole)))
        batches.append([[*part.split(sizes)] for part in whole[-1]])
    by_rank = pool.run(3, steps_of, chain(3), batches, mean_or_zero)
    for step, batch in enumerate(whole):
        assert_equal_steps([results[step] for results in by_rank], serial_step(chain(3), *batch))


def pair_in_training(linear: nn.Linear, x: Any) -> Any:
    """In training its boundary carries a pair, otherwise one tensor."""
    x = x[0] + x[1] if isinstance(x, tuple) else x
    return (linear(x), x) if linear.training else linear(x)


def summed(_: nn.Linear, x: Any) -> Tensor:
    return x[0] + x[1] if isinstance(x, tuple) else x


def steps_in_modes(rank: int, stages: Stages, plan: Plan, batch: Any, modes: list[bool]) -> list[StepResult]:
    results = []
    with Pipeline(stages, plan, loss_fn) as pipeline:
        for training in modes:
            stages[1].train(training)  # what the other ranks do not know
            results.append(cleared_step(pipeline, *batch))
    return results


def test_train_and_eval_between_steps(pool: Pool) -> None:
    stages = stages_of(pair_in_training, pair_in_training, summed)
    batch, modes = tensors(8), [True, True, False, False, True]
    by_rank = pool.run(3, steps_in_modes, stages, plan_for(3), batch, modes)
    for step, training in enumerate(modes):
        stages[1].train(training)
        clear(stages)
        assert_equal_steps([results[step] for results in by_rank], serial_step(stages, *batch))


def keep(linear: nn.Linear, x: Tensor) -> tuple[Tensor, int]:
    """Keeps the rows whose sum is positive: how many is known only when they are there."""
    kept = x[x.sum(1) > 0]
    return linear(kept), len(kept)


def use(linear: nn.Linear, kept: tuple[Tensor, int]) -> tuple[Tensor, int]:
    return torch.tanh(linear(kept[0])), kept[1]


def kept_loss(output: tuple[Tensor, int], target: Tensor) -> Tensor:
    return ((output[0].sum(0) / (output[1] + 1) - target.mean(0)) ** 2).mean()


def test_shapes_may_depend_on_the_data(pool: Pool) -> None:
    stages, batches = stages_of(keep, use, use), [tensors(12, seed=seed) for seed in range(4)]
    batches[1][0][:3].abs_().neg_()  # a micro-batch of which nothing is kept
    by_rank = pool.run(3, dynamic_steps, stages, batches)
    for step, batch in enumerate(batches):
        assert_equal_steps([results[step] for results in by_rank], serial_microbatches(stages, batch, 4, kept_loss))


def dynamic_steps(rank: int, stages: Stages, batches: list[Any]) -> Any:
    return steps_of(rank, stages, batches, kept_loss, dynamic_shapes=True)


def mend_the_batch(rank: int, stages: Stages, plan: Plan, batch: Any) -> Any:
    """Rank 0 gives batches that do not fit, hears so, and does better; the others wait meanwhile."""
    heard = []
    x, targets = batch
    with Pipeline(stages, plan, loss_fn) as pipeline:
        wrong = {
            0: [((x, x[:-1]), None), ([x], None), (None, None)],
            2: [(None, targets[:0]), (None, None), (None, [targets, targets, None, targets])],
        }
        for inputs, target in wrong.get(rank, []):
            heard.append(refusal(pipeline.step, inputs, target))
        return cleared_step(pipeline, *batch), heard


def test_batch_that_does_not_fit_is_refused_before_anything_is_sent(pool: Pool) -> None:
    batch = batch_of(4)
    by_rank = pool.run(3, mend_the_batch, chain(3), plan_for(3), batch)
    assert_equal_steps([result for result, _ in by_rank], serial_step(chain(3), *batch))
    uneven, few, none = by_rank[0][1]
    assert "inputs[1] has 19 rows (shape [19, 6]), but inputs[0] has 20; give the same number" in uneven
    assert "inputs is a list of 1 micro-batches, but the plan has 4" in few
    assert "rank 0 holds stage 0, which reads the step's inputs [0], but got inputs=None" in none
    empty, none, gap = by_rank[2][1]
    assert "targets has 0 rows (shape [0, 6]); give one row or more" in empty
    assert "rank 2 holds the last stage, but got targets=None" in none
    assert "rank 2 holds the last stage, but got targets[2] = None" in gap


def step_with(rank: int, stages: Stages, given: dict[int, tuple[Any, Any]]) -> None:
    with Pipeline(stages, plan_for(3), loss_fn) as pipeline:
        pipeline.step(*given.get(rank, (None, None)))


X, TARGETS = tensors(16)
UNFIT: dict[str, tuple[Stages, dict[int, tuple[Any, Any]], str]] = {
    "targets": (
        chain(3),
        {0: (X, None), 2: (None, TARGETS[:12])},
        "The size of tensor a (4) must match the size of tensor b (3) at non-singleton dimension 0",
    ),
    "dtype": (chain(3), {0: (X.float(), None), 2: (None, TARGETS)}, "mat1 and mat2 must have the same dtype"),
}


@pytest.mark.dist
@pytest.mark.parametrize("case", UNFIT)
def test_batches_that_do_not_fit_together_are_told_on_all_ranks(tmp_path: Path, case: str) -> None:
    stages, given, message = UNFIT[case]
    ended = run_fresh(tmp_path, 3, step_with, stages, given)
    assert all(each.exit_code == 1 for each in ended)
    assert all(message in each.stderr for each in ended)
    if case == "dtype":  # the error stays the user's, and says where it was
        assert "rota: in 0F0 on rank 0, stage 0 (Layer)" in ended[0].stderr
        assert "RuntimeError: mat1" in ended[0].stderr
    else:
        assert "rota: in 2F0 on rank 2, stage 2 (Layer), which received float64[4, 6]" in ended[2].stderr
        assert "LostRankError" in ended[0].last_line


def replicas_of_other_lengths(rank: int) -> float:
    """Sequences padded to each replica's longest: right, and nothing is said."""
    with Pipeline(chain(2), plan_for(2), loss_fn, mesh=rota.mesh(pp=2, dp=2)) as pipeline:
        return pipeline.step(*tensors(8, 3 + pipeline.replica))


def test_replicas_may_have_other_shapes(pool: Pool) -> None:
    assert len({*pool.run(4, replicas_of_other_lengths)}) == 1


@on_ranks(3)
def test_a_microbatch_without_rows_is_told_as_such(rank: int) -> None:
    x, targets = tensors(9)
    sizes = [3, 0, 4, 2]
    with Pipeline(chain(3), plan_for(3), loss_fn) as pipeline:
        told = refusal(pipeline.step, [*x.split(sizes)], [*targets.split(sizes)])
    assert "step 1: the mean loss is nan (nan for micro-batch 1 at stage 2 on rank 2)" in told
    assert "micro-batch 1 had no rows, so their mean is nan: give each micro-batch a row or more" in told
    assert "learning rate" not in told


# --- batches as users have them: encodings, inputs that are the same for all rows, rows that do not divide ------------

N, LENGTH = 4, 5


def first(stage: Any, ids: Tensor, positions: Tensor, factor: Tensor) -> Tensor:
    """Reads tokens, positions that are the same for all rows, and a factor."""
    return (stage.tokens(ids) + stage.positions(positions)) * factor


def last(stage: Any, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    return torch.tanh(stage.linear(x)) * mask[..., None] + positions[..., None]


def reading_stages() -> Stages:
    torch.manual_seed(0)
    names = ["input_ids", "position_ids", "factor", "attention_mask"]
    embeddings = {"tokens": nn.Embedding(9, WIDTH), "positions": nn.Embedding(LENGTH, WIDTH)}
    modules = [Calls(first, **embeddings).double(), Calls(last, linear=nn.Linear(WIDTH, WIDTH)).double()]
    return Stages(modules, inputs={0: names[:3], 1: ["attention_mask", "position_ids"]}, input_names=names)


def encoded_loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return loss_fn(output, target["labels"])


def encoding(rows: int) -> tuple[UserDict[str, Any], UserDict[str, Any]]:
    """As a tokenizer's BatchEncoding."""
    generator = torch.Generator().manual_seed(rows)
    inputs = UserDict(
        position_ids=torch.arange(LENGTH)[None],
        input_ids=torch.randint(9, (rows, LENGTH), generator=generator),
        attention_mask=torch.rand(rows, LENGTH, generator=generator).double(),
        factor=torch.tensor(2.0).double(),
        text="the same for all",
    )
    return inputs, UserDict(labels=torch.randn(rows, LENGTH, WIDTH, generator=generator).double())


def steps(rank: int, plan: Plan, all_rows: list[int], whole: bool) -> list[Any]:
    results = []
    with Pipeline(reading_stages(), plan, encoded_loss) as pipeline:
        for rows in all_rows:
            inputs, targets = encoding(rows)
            if not whole:  # each rank what it reads alone
                for name in ("attention_mask",) if rank == 0 else ("input_ids", "factor"):
                    del inputs[name]
            result = cleared_step(pipeline, inputs, targets if pipeline.reads_targets else None)
            assert result.loss == pytest.approx(pipeline.evaluate(inputs, targets), rel=1e-10)
            outputs = pipeline.forward(inputs)
            results.append((result, torch.cat(outputs)))
    return results


@pytest.mark.parametrize(("kind", "whole"), [("1f1b", False), ("I and W", True), ("R", True)])
def test_encodings_of_any_number_of_rows(pool: Pool, kind: str, whole: bool) -> None:
    plans = {"1f1b": plan_for(2), "I and W": plan_for(2, "zb_h1", weight_us=1), "R": plan_for(2, recompute_us=1)}
    all_rows = [8, 7, 8, 3, 1, 2, 13]
    by_rank = pool.run(2, steps, plans[kind], all_rows, whole)
    for step, rows in enumerate(all_rows):
        stages = reading_stages()
        inputs, targets = encoding(rows)
        output = stages.run(inputs)
        loss = encoded_loss(output, dict(targets))
        loss.backward()
        assert_equal_steps(
            [results[step][0] for results in by_rank], StepResult(loss.item(), gradients_of(stages, range(2)))
        )
        for results in by_rank:
            torch.testing.assert_close(results[step][1], output, rtol=1e-10, atol=1e-10)


@on_ranks(2)
def test_rows_that_do_not_belong_together_are_refused(rank: int) -> None:
    with Pipeline(reading_stages(), plan_for(2), encoded_loss) as pipeline:
        for rows, target_rows in ((7, 14), (8, 1), (1, 8)):
            inputs, targets = encoding(rows)[0], encoding(target_rows)[1]
            told = refusal(pipeline.step, inputs, targets if pipeline.reads_targets else None)
            assert f"inputs have {rows} rows and targets {target_rows}, which do not both divide into 4" in told
            assert "give the same number of rows" in told
        pipeline.step(*encoding(8))  # it goes on


def beside_junk(rank: int) -> float:
    """Rank 1 reads nothing, and is given what fits nothing."""
    rows = 5 if rank == 1 else 7
    x = torch.full((rows, WIDTH), 1.0 + (rank == 1), dtype=torch.float64)
    with Pipeline(chain(3), plan_for(3), loss_fn) as pipeline:
        assert (pipeline.reads_inputs, pipeline.reads_targets) == (rank == 0, rank == 2)
        return pipeline.step(x, [x] * N if rank == 1 else x)


def test_what_a_rank_does_not_read_does_not_count(pool: Pool) -> None:
    assert len({*pool.run(3, beside_junk)}) == 1


def writes(stage: Any, x: Tensor, positions: Tensor) -> Tensor:
    positions += 1
    return stage.linear(x) + positions


@on_ranks(1)
def test_what_all_microbatches_get_must_not_be_written_to(rank: int) -> None:
    stages = Stages([Calls(writes, linear=nn.Linear(WIDTH, WIDTH))], inputs={0: [0, 1]})
    with Pipeline(stages, plan_for(1), loss_fn) as pipeline:
        told = refusal(pipeline.step, (torch.ones(8, WIDTH), torch.ones(1, WIDTH)), torch.ones(8, WIDTH))
    assert "a stage writes into inputs[1] (shape [1, 6]), which is the same for all micro-batches" in told
