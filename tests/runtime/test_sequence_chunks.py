"""Samples in chunks along their length: every gradient is that of the unsplit model on the whole samples."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import rota
from rota import (
    Cluster,
    Costs,
    Pipeline,
    PipelineError,
    Placement,
    Plan,
    Stages,
    chunk_start,
    place,
    profile_chunks,
    schedules,
    simulate,
    with_earlier_chunks,
)
from rota.planning.verify_on_ranks import Unsplit
from rota.runtime.gradients.chunks import length_of, refuse_other_than_whole
from support.core_strategies import Chooser, deal, linear_extension
from support.networks import StepResult, assert_equal_steps, clear, cleared_step, gradients_of
from support.odd_stages import Calls
from support.pool import Pool, on_ranks
from support.text_models import WIDTH, WORDS, Attention, Words, gpt_stages, summed_loss, tokens

ROWS, LENGTH = 3, 13


def placement(num_ranks: int, sample_of: tuple[int, ...], kind: str = "whole") -> Placement:
    split, again = kind == "split", (10,) * num_ranks if kind == "recomputed" else None
    costs = Costs.uniform(num_ranks, 10, 20, 10 if split else None)
    return replace(place(replace(costs, recompute_us=again), Cluster.uniform(num_ranks)), sample_of=sample_of)


def plans(num_ranks: int) -> list[Plan]:
    """Even and uneven numbers of chunks; whole, split and recomputed backwards; Seq1F1B, GPipe and any orders."""
    thirds, mixed = (0, 0, 0, 1, 1, 1, 2, 2, 2), (0, 0, 1, 2, 2, 2, 2)
    found = [schedules.seq1f1b(placement(num_ranks, samples), len(samples)) for samples in (thirds, mixed)]
    for kind in ("split", "recomputed"):
        here = placement(num_ranks, mixed, kind)
        found.append(schedules.gpipe(here, len(mixed)))
        found.append(deal(here, len(mixed), linear_extension(here, len(mixed), Chooser(num_ranks), in_order=False)))
    return found


def steps(rank: int, given: list[Plan], lists: dict[int, Any]) -> list[Any]:
    """For each plan two steps and an evaluation; `lists`: micro-batches for some plans, others cut the batch."""
    results = []
    for i, plan in enumerate(given):
        inputs, targets = lists.get(i, tokens(ROWS, LENGTH))
        with Pipeline(gpt_stages(plan.num_ranks), plan, summed_loss) as pipeline:
            evaluated = pipeline.evaluate(inputs, targets)
            pipeline.step(inputs, targets)
            results.append((cleared_step(pipeline, inputs, targets), evaluated))
            assert not pipeline._engine.compute._chunks._leaves  # nothing is held after the step
    return results


def unsplit(num_stages: int, num_replicas: int = 1) -> StepResult:
    stages, total, count = gpt_stages(num_stages), torch.zeros((), dtype=torch.float64), 0
    for replica in range(num_replicas):
        inputs, targets = tokens(ROWS, LENGTH, seed=replica)
        loss, num_tokens = summed_loss(stages.run(inputs), targets)
        total, count = total + loss, count + int(num_tokens)
    (total / count).backward()
    return StepResult(float(total.detach()) / count, gradients_of(stages, range(num_stages)))


def uneven(values: torch.Tensor) -> list[torch.Tensor]:
    """Chunks of very different lengths, for samples of 2, 1 and 4 chunks."""
    lengths = [(1, 12), (13,), (2, 7, 1, 3)]
    return [part for row, of in zip(values.split(1), lengths, strict=True) for part in row.split(of, 1)]


def test_gradients_are_those_of_the_whole_samples(pool: Pool) -> None:
    num_ranks = 2
    given = plans(num_ranks)
    inputs, targets = tokens(ROWS, LENGTH)
    by_rank = pool.run(num_ranks, steps, given, {1: (uneven(inputs), uneven(targets))})
    whole = unsplit(num_ranks)
    for i in range(len(given)):
        assert_equal_steps([of_rank[i][0] for of_rank in by_rank], whole)
        assert all(abs(of_rank[i][1] - whole.loss) < 1e-10 for of_rank in by_rank)


def plan_steps(rank: int, base: Plan, given: list[list[Plan]], recompute: Any, dp: int) -> list[Any]:
    """A step and an evaluation with each plan, by replica, on rows of the replica's own."""
    results = []
    mesh = rota.mesh(pp=2, dp=dp)
    with Pipeline(gpt_stages(2), base, summed_loss, mesh=mesh, check_data="never", recompute=recompute) as pipeline:
        for of_replicas in given:
            plan = of_replicas[pipeline.replica]
            inputs, targets = tokens(ROWS, LENGTH, seed=pipeline.replica)
            evaluated = pipeline.evaluate(inputs, targets, plan=plan)
            results.append((cleared_step(pipeline, inputs, targets, plan=plan), evaluated))
    return results


@pytest.mark.parametrize(("dp", "recompute"), [(1, "none"), (2, "full")])
def test_plans_per_step_of_replicas_that_have_other_chunks(pool: Pool, dp: int, recompute: str) -> None:
    """Between steps, the chunks change, and there are steps without any."""
    mixed, whole_ones = (0, 0, 1, 2, 2, 2, 2), (0, 1, 2)
    seq = [schedules.seq1f1b(placement(2, samples), len(samples)) for samples in ((0, 0, 0, 1, 1, 1, 2, 2, 2), mixed)]
    base = schedules.one_f_one_b(place(Costs.uniform(2, 10, 20), Cluster.uniform(2)), 3)
    given = [[seq[0], seq[1]], [base, base], [seq[1], schedules.gpipe(placement(2, whole_ones), 3)]]
    by_process = pool.run(2 * dp, plan_steps, base, given, recompute, dp)
    whole = unsplit(2, dp)
    for i in range(len(given)):
        assert_equal_steps([of_process[i][0] for of_process in by_process], whole)
        assert all(abs(of_process[i][1] - whole.loss) < 1e-10 for of_process in by_process)


@on_ranks(2)
def test_verify_compares_whole_samples(rank: int) -> None:
    """The same model and another one."""
    samples, found = (0, 0, 0, 1, 1, 2), []
    plan = schedules.seq1f1b(placement(2, samples), len(samples))
    with Pipeline(gpt_stages(2), plan, summed_loss) as pipeline:
        for stages in (gpt_stages(2), gpt_stages(2, is_causal=False)):
            batch = tokens(2 * ROWS, LENGTH)
            pipeline.stages.unsplit = Unsplit(stages)
            report = rota.verify(pipeline, *batch)
            found.append((report.exact, [each.output_difference for each in report.comparisons]))
    good, bad = found
    assert good[0]
    assert all(difference is not None and difference < 1e-4 for difference in good[1])
    assert not bad[0]
    assert bad[1][0] > 1e-4


def in_place(_: Any, x: torch.Tensor) -> torch.Tensor:
    k = 1 * x
    (joined,) = with_earlier_chunks(k)
    k.add_(1)
    return x + joined[:, -x.shape[1] :]


def only_first(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x if chunk_start() else x + 0 * with_earlier_chunks(x)[0]


def checkpointed(*, use_reentrant: bool) -> torch.nn.Module:
    return Calls(lambda s, x: checkpoint(s.block, x, use_reentrant=use_reentrant), block=Attention())


def mean_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return summed_loss(output, targets)[0] / targets.numel()


@on_ranks(1)
def test_what_would_not_be_exact_is_refused(rank: int) -> None:
    """Wrong models, losses and batches, on a rank alone."""
    plan, told = schedules.seq1f1b(placement(1, (0, 0, 0, 1, 1, 1)), 6), []
    inputs, targets = tokens(2, 9)

    def stage(*modules: torch.nn.Module) -> Stages:
        return Stages([torch.nn.Sequential(Words(), *modules, torch.nn.Linear(WIDTH, WORDS)).double()])

    good = stage(Attention(drop=0.5))
    for stages, loss, *batch in [
        (stage(Attention(joins=False)), summed_loss, inputs, targets),
        (stage(Attention(is_causal=False)), summed_loss, inputs, targets),
        (stage(torch.nn.Conv1d(9, 9, 1)), summed_loss, inputs, targets),
        (stage(Calls(in_place)), summed_loss, inputs, targets),
        (stage(Calls(only_first)), summed_loss, inputs, targets),
        (stage(checkpointed(use_reentrant=False)), summed_loss, inputs, targets),
        (stage(checkpointed(use_reentrant=True)), summed_loss, inputs, targets),
        (good, mean_loss, inputs, targets),
        (good, summed_loss, inputs[:1], targets[:1]),
        (good, summed_loss, inputs[:, :2], targets[:, :2]),
        (good, summed_loss, inputs, targets[:, 0]),
        (good, summed_loss, inputs, targets),
    ]:
        try:
            with Pipeline(stages, plan, loss) as pipeline:
                pipeline.step(*batch)
        except Exception as error:
            told.append(str(error))
        else:
            told.append("")
    unlike = "computes something else for two chunks of a sample than for both at once"
    expected = [unlike, unlike, "", "writes into what it gave", "equally often for every chunk"]
    expected += ["called in a backward, as blocks in torch.utils.checkpoint do"] * 2
    expected += ["the loss of a chunk is a mean", "has 1 rows for 2 samples", "shapes [1, 2], which are not cut into 3"]
    expected += ["targets has tensors of shapes [1]", ""]  # dropout draws for each chunk, and is left out of the check
    for found, message in zip(told, expected, strict=True):
        assert message in found
    assert told[-1] == ""
    with pytest.raises(PipelineError, match="no tensor of shape"):
        length_of([torch.zeros(3)], "stage 0")


def masked(by_length: bool, _: Any, x: torch.Tensor) -> torch.Tensor:
    """Excludes words by an infinite logit; by another one in the second chunk if `by_length`."""
    result = x.clone()
    result[..., x.shape[1] % 2 if by_length else 0] = -torch.inf
    return result


def test_infinite_outputs_of_chunks_are_compared() -> None:
    chunks = (torch.ones(1, 3, 2),), (torch.ones(1, 3, 2),)
    refuse_other_than_whole(Calls(partial(masked, False)), "stage 0", *chunks)
    with pytest.raises(PipelineError, match="computes something else for two chunks"):
        refuse_other_than_whole(Calls(partial(masked, True)), "stage 0", *chunks)


def watched(rank: int, plan: Plan, length: int) -> int:
    batch = tokens(2, length)
    with Pipeline(gpt_stages(plan.num_ranks), plan, summed_loss) as pipeline:
        pipeline.step(*batch)
        clear(pipeline)
        with pipeline.watch_memory() as watch:
            pipeline.step(*batch)
        return watch.peak_bytes + plan.placement.static_bytes[rank]


def test_what_chunks_hold_is_as_profiled(pool: Pool) -> None:
    """Keys, values and their gradients are part of what each place in a sample is planned to hold."""
    length, num_chunks = 24, 3
    inputs, targets = tokens(1, length)
    costs = profile_chunks(gpt_stages(2), inputs, targets, summed_loss, num_chunks=num_chunks, repeats=1)
    later = [each.activation_bytes[1] for each in costs]
    assert later[0] < later[1]  # which joins keys and values of both
    places = [place(each, Cluster.uniform(2)) for each in costs]
    plan = schedules.seq1f1b(Placement.of_classes(places, (0, 1, 2) * 2, (0, 0, 0, 1, 1, 1)), 6)
    planned = simulate(plan).peak_memory_bytes
    measured = pool.run(2, watched, plan, length)
    for rank in range(2):
        assert 0.7 * planned[rank] < measured[rank] <= planned[rank] + 2000, (measured, planned)
