"""rota.Planner: each batch gets its plan from another process, while the batch before it runs."""

import random
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import rota
from rota import Cluster, Costs, Curve, Pipeline, PipelineError, place
from rota.schedules import one_f_one_b
from support import ROOT
from support.networks import StepResult, assert_equal_steps, gradients_of
from support.pool import Pool, on_ranks
from support.text_models import IGNORED, LONGEST, gpt_stages, samples, step_by_sample, summed_loss

PLAN_WITH = "support.token_budget:plan"
TOKENS = 30


def batches(num_batches: int, most: int = LONGEST) -> list[list[Tensor]]:
    rng = random.Random(0)
    return [samples([rng.randint(1, most) for _ in range(rng.randint(8, 16))], seed) for seed in range(num_batches)]


def collate(group: list[Tensor], length: int) -> tuple[Tensor, Tensor]:
    words, labels = torch.zeros(len(group), length, dtype=torch.int64), torch.full((len(group), length), IGNORED)
    for row, sample in enumerate(group):
        words[row, : len(sample) - 1], labels[row, : len(sample) - 1] = sample[:-1], sample[1:]
    return words, labels


def tokens_in(sample: Tensor) -> int:
    return len(sample) - 1


def even_length(sample: Tensor) -> int:
    return tokens_in(sample) + tokens_in(sample) % 2


def planner_of(pipeline: Pipeline, batches: Any, **options: Any) -> rota.Planner:
    options = {"num_ranks": pipeline.plan.num_ranks, "tokens": TOKENS} | options
    return rota.Planner(pipeline, batches, collate, PLAN_WITH, length_of=even_length, options=options)


def base_plan(num_ranks: int) -> rota.Plan:
    return one_f_one_b(place(Costs.uniform(num_ranks), Cluster.uniform(num_ranks)), 2)


def train(rank: int, num_batches: int, dp: int) -> list[tuple[StepResult, Any]]:
    results = []
    mesh = rota.mesh(pp=2, dp=dp)
    with Pipeline(gpt_stages(2), base_plan(2), summed_loss, mesh=mesh, check_data="never") as pipeline:
        own_batches = batches(num_batches) if pipeline.reads_inputs or pipeline.reads_targets else None
        for batch in planner_of(pipeline, own_batches):
            assert (batch.inputs is not None) == (pipeline.rank == 0)
            assert (batch.targets is not None) == (pipeline.rank == 1)
            for parameter in pipeline.parameters():
                parameter.grad = None
            loss = pipeline.step(batch.inputs, batch.targets, plan=batch.plan, sizes=batch.sizes)
            result = StepResult(loss, gradients_of(pipeline.stages, pipeline.local_stages))
            results.append((result, (batch.groups, batch.sizes, batch.makespan_us)))
    return results


@pytest.mark.parametrize("dp", [1, 2])
def test_every_batch_is_planned_and_exact(pool: Pool, dp: int) -> None:
    by_process = pool.run(2 * dp, train, 4, dp)
    assert [len(results) for results in by_process] == [4] * (2 * dp)
    for i, batch in enumerate(batches(4)):
        whole = step_by_sample(2, batch)
        assert_equal_steps([results[i][0] for results in by_process], whole)
        trained = sorted(m for results in by_process[::2] for group in results[i][1][0] for m in group)
        assert trained == [*range(len(batch))]
        for (groups, sizes, makespan_us), group in ((results[i][1], results[i][1][0]) for results in by_process):
            assert makespan_us == by_process[0][i][1][2]
            assert [rows for rows, _ in sizes] == [*map(len, group)]
            assert all(rows * length <= TOKENS and length % 2 == 0 for rows, length in sizes)
            assert len(groups) == len(sizes)


#: Times by size, and 1,000 bytes per token.
MODEL = rota.SizeModel((Curve(60, 2, 0.1),) * 2, (Curve(120, 4, 0.2),) * 2, activation_bytes=(Curve(0, 1000),) * 2)


def train_by_model(rank: int, batches: list[list[Tensor]]) -> tuple[list[Any], str, int]:
    """Steps of all batches but the last, which has a sample that fits nowhere; each is evaluated before."""
    results: list[Any] = []
    with Pipeline(gpt_stages(2), base_plan(2), summed_loss, mesh=rota.mesh(pp=2, dp=2), check_data="never") as pipeline:
        planner = rota.Planner(
            pipeline,
            batches,
            collate,
            MODEL,
            length_of=tokens_in,
            options={"tries": 20, "cluster": Cluster.uniform(2, 60_000)},
        )
        try:
            for batch in planner:
                for parameter in pipeline.parameters():
                    parameter.grad = None
                assert batch.bound_us <= batch.makespan_us
                evaluated = pipeline.evaluate(batch.inputs, batch.targets, plan=batch.plan, sizes=batch.sizes)
                loss = pipeline.step(batch.inputs, batch.targets, plan=batch.plan, sizes=batch.sizes)
                result = StepResult(loss, gradients_of(pipeline.stages, pipeline.local_stages))
                own_us = rota.simulate(batch.plan).makespan_us
                results.append((result, evaluated, batch.groups, own_us, batch.makespan_us))
        except PipelineError as error:
            return results, str(error), pipeline.num_steps
    return results, "", 0


def test_replicas_get_batches_balanced_by_the_model(pool: Pool) -> None:
    given = batches(3)
    too_long = 1 + 60
    given.append([*given[0], torch.zeros(too_long + 1, dtype=torch.int64)])
    found = pool.run(4, train_by_model, given)
    for i, batch in enumerate(given[:-1]):
        of_batch = [results[i] for results, _, _ in found]
        whole = step_by_sample(2, batch)
        assert_equal_steps([result for result, *_ in of_batch], whole)
        assert all(abs(evaluated - whole.loss) < 1e-10 for _, evaluated, *_ in of_batch)
        groups = [of[2] for of in of_batch[::2]]  # of each replica
        assert sorted(m for of in groups for group in of for m in group) == [*range(len(batch))]
        spans = [of[3] for of in of_batch[::2]]
        assert max(spans) == of_batch[0][4]
        assert max(spans) <= 1.3 * min(spans)
    message = {error for _, error, _ in found}
    assert len(message) == 1
    which = f"sample {len(given[0])} of length {too_long}"
    assert f"{which} fits in no micro-batch: alone it needs {1000 * too_long} bytes" in message.pop()
    assert {num_steps for _, _, num_steps in found} == {3}  # none of the batch that is refused


def run_page(rank: int, code: str) -> list[float]:
    """The page's code, with a model of costs that is measured here and plans by `rota.plan_batch`."""
    losses: list[float] = []
    stages = gpt_stages(2)

    def make_batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
        return collate(samples([length] * rows, 0), length)

    with (
        mock.patch("rota.profiling.stage_profile._RUN_NS", 0),
        Pipeline(stages, base_plan(2), summed_loss, check_data="never") as pipeline,
    ):
        step = pipeline.step

        def noted(*args: Any, **options: Any) -> float:
            assert options["plan"].placement.class_of
            losses.append(step(*args, **options))
            return losses[-1]

        space = {
            "rota": rota,
            "stages": stages,
            "make_batch": make_batch,
            "loss_fn": summed_loss,
            "pipeline": pipeline,
            "loader": batches(3, LONGEST - 1),  # a sample has one token more than it has inputs
            "collate": collate,
            "optimizer": torch.optim.SGD(pipeline.parameters(), 0.1),
        }
        with mock.patch.object(pipeline, "step", noted):
            exec(code, space)
    return losses


def test_the_code_of_the_page_runs(pool: Pool) -> None:
    page = (ROOT / "docs" / "variable-batches.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    code = next(block for block in blocks if "rota.Planner(" in block).replace("(64, 128, 256, 512)", "(4, 8, 12)")
    first, second = pool.run(2, run_page, code)
    assert first == second
    assert len(first) == 3


def error_of(pipeline: Pipeline, planner: rota.Planner) -> str:
    try:
        for batch in planner:
            pipeline.step(batch.inputs, batch.targets, plan=batch.plan, sizes=batch.sizes)
    except PipelineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "message"), [("lengths", "samples of different lengths"), ("fewer", "differ in their number of batches")]
)
@on_ranks(2)
def test_loaders_that_differ_are_refused_on_all_ranks(rank: int, how: str, message: str) -> None:
    def others() -> Iterator[list[Tensor]]:
        for i, batch in enumerate(batches(3)):
            if i == 1 and rank == 1 and how == "lengths":
                yield [*batch, batch[0]]
            elif i < 2 or rank == (how == "more"):
                yield batch

    with Pipeline(gpt_stages(2), base_plan(2), summed_loss, check_data="never") as pipeline:
        assert message in error_of(pipeline, planner_of(pipeline, others()))
