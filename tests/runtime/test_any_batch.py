"""Batches as users have them: encodings, inputs that are the same for all rows, rows that do not divide."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Pipeline, Plan, Stages
from support.fresh import run_fresh
from support.networks import (
    StepResult,
    assert_equal_steps,
    chain,
    cleared_step,
    gradients_of,
    loss_fn,
    plan_for,
    refusal,
)
from support.odd_stages import Calls
from support.pool import Pool

pytestmark = pytest.mark.dist

N, LENGTH, WIDTH = 4, 5, 6


class Encoding(UserDict[str, Any]):
    """As a tokenizer's BatchEncoding."""


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


def encoding(rows: int) -> tuple[Encoding, Encoding]:
    generator = torch.Generator().manual_seed(rows)
    inputs = Encoding(
        position_ids=torch.arange(LENGTH)[None],
        input_ids=torch.randint(9, (rows, LENGTH), generator=generator),
        attention_mask=torch.rand(rows, LENGTH, generator=generator).double(),
        factor=torch.tensor(2.0).double(),
        text="the same for all",
    )
    return inputs, Encoding(labels=torch.randn(rows, LENGTH, WIDTH, generator=generator).double())


def steps(rank: int, plan: Plan, all_rows: list[int], whole: bool) -> list[Any]:
    results = []
    with Pipeline(reading_stages(), plan, encoded_loss, keep_outputs=True) as pipeline:
        for rows in all_rows:
            inputs, targets = encoding(rows)
            if not whole:  # each rank what it reads alone
                for name in ("attention_mask",) if rank == 0 else ("input_ids", "factor"):
                    del inputs[name]
            result = cleared_step(pipeline, inputs, targets if pipeline.reads_targets else None)
            assert result.loss == pytest.approx(pipeline.evaluate(inputs, targets), rel=1e-10)
            outputs = pipeline.forward(inputs)
            assert outputs is not None
            results.append((result, torch.cat(outputs)))
    return results


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", ["1f1b", "I and W", "R"])
def test_encodings_of_any_number_of_rows(pool: Pool, kind: str, whole: bool) -> None:
    plans = {
        "1f1b": plan_for(2),
        "I and W": plan_for(2, "zb_h1", weight_us=1),
        "R": plan_for(2, recompute_us=1),
    }
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


# --- refused ----------------------------------------------------------------------------------------------------------


def refusals(rank: int) -> list[str]:
    told = []
    with Pipeline(reading_stages(), plan_for(2), encoded_loss) as pipeline:
        for rows, target_rows in ((7, 14), (8, 1), (1, 8)):
            inputs, targets = encoding(rows)[0], encoding(target_rows)[1]
            told.append(refusal(pipeline.step, inputs, targets if pipeline.reads_targets else None))
        pipeline.step(*encoding(8))  # it goes on
    return told


def test_rows_that_do_not_belong_together_are_refused(pool: Pool) -> None:
    by_rank = pool.run(2, refusals)
    assert by_rank[0] == by_rank[1]
    for told, (rows, target_rows) in zip(by_rank[0], ((7, 14), (8, 1), (1, 8)), strict=True):
        assert f"inputs have {rows} rows and targets {target_rows}, which do not both divide into 4" in told
        assert "give the same number of rows" in told


def beside_junk(rank: int) -> float:
    """Rank 1 reads nothing, and is given what fits nothing."""
    rows = 5 if rank == 1 else 7
    x = torch.full((rows, WIDTH), 1.0 + (rank == 1), dtype=torch.float64)
    with Pipeline(chain(3), plan_for(3), loss_fn) as pipeline:
        assert (pipeline.reads_inputs, pipeline.reads_targets) == (rank == 0, rank == 2)
        return pipeline.step(x, [x] * N if rank == 1 else x)


def test_what_a_rank_does_not_read_does_not_count(pool: Pool) -> None:
    assert len({*pool.run(3, beside_junk)}) == 1


def writes(_: Any, x: Tensor, positions: Tensor) -> Tensor:
    positions += 1
    return x + positions


def writing_step(rank: int) -> None:
    stages = Stages([Calls(writes), nn.Linear(WIDTH, WIDTH)], inputs={0: [0, 1]})
    with Pipeline(stages, plan_for(2), loss_fn) as pipeline:
        pipeline.step((torch.ones(8, WIDTH), torch.ones(1, WIDTH)), torch.ones(8, WIDTH))


def test_what_all_microbatches_get_must_not_be_written_to(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, 2, writing_step)
    assert all(each.exit_code == 1 for each in ended)
    told = "PipelineError: a stage writes into inputs[1] (shape [1, 6]), which is the same for all micro-batches"
    assert told in ended[0].last_line
