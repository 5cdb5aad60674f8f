"""Replicas of a pipeline: the unsplit model's training on the whole batch, reduced once a step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rota
from rota import Cluster, Costs, Pipeline, Stages, Timeline, compare, place, simulate, spmd
from rota.schedules import NAMED
from support.meshed import NUM_MICROBATCHES, Case, part_of, plan_of
from support.networks import batch_of, chain, gradients_of, loss_fn, plan_for, refusal
from support.odd_stages import Calls
from support.pool import Pool, on_ranks


def tied_chain() -> Stages:
    stages = chain(3)
    stages[2].linear.weight = stages[0].linear.weight
    return stages


#: Steps with and without sync, and what the caller does to gradients between them.
ACTIONS = (
    *("sync", "sync", "leave", "sync", "clear", "leave", "leave", "sync"),
    *("leave", "clear", "sync", "leave", "zero", "leave", "sync", "zero", "sync"),
)


def gradients_over_steps(rank: int, pp: int, dp: int) -> list[tuple[int, dict[tuple[int, str], Tensor]]]:
    """(number of the action, gradients) after each step with sync."""
    mesh = rota.mesh(pp=pp, dp=dp)
    stages, found = tied_chain(), []
    plan = NAMED["gpipe"](place(Costs.uniform(3), Cluster.uniform(pp), [0, pp // 2, pp - 1]), NUM_MICROBATCHES)
    with Pipeline(stages, plan, loss_fn, mesh=mesh, check_data="never") as pipeline:
        for i, action in enumerate(ACTIONS):
            if action in ("clear", "zero"):
                nn.ModuleList(stages.modules).zero_grad(set_to_none=action == "clear")
                continue
            pipeline.step(*part_of(batch_of(8, i), pipeline), scale=1 / (i + 1), sync=action == "sync")
            if action == "sync":
                found.append((i, gradients_of(stages, pipeline.local_stages)))
    return found


@pytest.mark.parametrize(("pp", "dp"), [(2, 2), (3, 1)])
def test_gradients_add_up_over_steps_with_and_without_sync(pool: Pool, pp: int, dp: int) -> None:
    by_process = pool.run(pp * dp, gradients_over_steps, pp, dp)
    stages, expected = tied_chain(), {}
    for i, action in enumerate(ACTIONS):
        if action in ("clear", "zero"):
            nn.ModuleList(stages.modules).zero_grad()
            continue
        x, target = batch_of(8, i)
        (loss_fn(stages.run(x), target) / (i + 1)).backward()
        expected[i] = gradients_of(stages, range(3))
    for found in by_process:
        assert [i for i, _ in found] == [i for i, action in enumerate(ACTIONS) if action == "sync"]
        for i, gradients in found:
            for key, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[i][key], rtol=1e-10, atol=1e-10)
    assert {key for found in by_process for key in found[0][1]} == expected[0].keys()


def change_gradients_within_a_round(rank: int) -> str:
    stages = tied_chain()
    plan = plan_for(3)
    with Pipeline(stages, plan, loss_fn) as pipeline:
        pipeline.step(*batch_of(4))
        pipeline.step(*batch_of(4), sync=False)
        pipeline.clip_grad_norm_(1e-3)
        if rank == 1:  # holds no tied weight
            return ""
        base = pipeline._engine.plans.base
        return refusal(pipeline._engine.gradients.begin, base.reductions, True, False)


def test_gradients_of_tied_weights_changed_within_a_round_are_refused(pool: Pool) -> None:
    told = pool.run(3, change_gradients_within_a_round)
    assert told[0] == told[2]
    assert "a tied weight of shape [6, 6] was changed between two steps, the first one with sync=False" in told[0]


def tied_and_used_by(ranks: tuple[int, ...]) -> Stages:
    torch.manual_seed(0)
    tie = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def run(module: Any, x: Tensor) -> Tensor:
        return module.linear(x) * (module.tie if module.uses else 1)

    stages = [Calls(run, linear=nn.Linear(6, 6).double(), tie=tie) for _ in range(2)]
    for rank, stage in enumerate(stages):
        stage.uses = rank in ranks
    return Stages(stages)


def gradient_of_tie(process: int, user: int | None) -> Tensor | None:
    mesh, stages = rota.mesh(pp=2, dp=2), tied_and_used_by((process % 2,) if process == user else ())
    with Pipeline(stages, plan_for(2), loss_fn, mesh=mesh) as pipeline:
        pipeline.step(*part_of(batch_of(8), pipeline))
    gradient: Tensor | None = stages[0].tie.grad
    return gradient


@pytest.mark.parametrize("user", [None, 1, 2])
def test_a_tie_that_is_used_by_one_rank_of_one_replica(pool: Pool, user: int | None) -> None:
    gradients = pool.run(4, gradient_of_tie, user)
    if user is None:
        assert gradients == [None] * 4
        return
    stages, (x, target) = tied_and_used_by((user % 2,)), (part.chunk(2)[user // 2] for part in batch_of(8))
    (loss_fn(stages.run(x), target) / 2).backward()
    torch.testing.assert_close(gradients, [stages[0].tie.grad] * 4, rtol=1e-10, atol=1e-10)


class Odd(nn.Module):
    """Parameters of several dtypes, one that no replica uses, one that only some do, one that is frozen; buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self.in_float16, self.in_bfloat16 = (
            nn.Parameter(torch.ones(6, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16)
        )
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex128))
        self.last = nn.Parameter(torch.randn(2, 3, 1, 1, dtype=torch.float64).to(memory_format=torch.channels_last))
        self.unused, self.sometimes = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones((), dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.use = False

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weight * self.in_float16 * self.in_bfloat16 * self.turn).real + self.last.sum()
        return y * self.sometimes if self.use else y


def odd_parameters(rank: int, reduce_dtype: torch.dtype | None) -> tuple[dict[str, Any], list[Any]]:
    """Replicas begin with values of their own; the first's count. Only the last one uses one of its weights."""
    torch.manual_seed(rank)
    stage = Odd()
    stage.use = rank == 2
    stage.mask ^= bool(rank)
    mesh = rota.mesh(pp=1, dp=3)
    plan = plan_for(1, "gpipe", 2)
    with Pipeline(Stages([stage]), plan, loss_fn, mesh=mesh, reduce_dtype=reduce_dtype) as pipeline:
        pipeline.step(*part_of(batch_of(6), pipeline))
    return {name: p.grad for name, p in stage.named_parameters()}, [*stage.state_dict().values()]


def test_odd_parameters(pool: Pool) -> None:
    by_process = pool.run(3, odd_parameters, None) + pool.run(3, odd_parameters, torch.float32)
    torch.manual_seed(0)
    stage = Odd()
    for replica, (x, target) in enumerate(zip(*(t.chunk(3) for t in batch_of(6)), strict=True)):
        stage.use = replica == 2
        (loss_fn(stage(x), target) / 3).backward()
    for gradients, state in by_process:
        torch.testing.assert_close(state, [*stage.state_dict().values()])
        for name, p in stage.named_parameters():
            assert (gradients[name] is None) == (p.grad is None) == (name in ("unused", "frozen")), name
            if p.grad is not None:
                tolerance = 1e-10 if p.dtype in (torch.float64, torch.complex128) else 0.02
                torch.testing.assert_close(gradients[name], p.grad, rtol=tolerance, atol=tolerance)


#: Of each replica: in their own precision a sum around the ring loses what is small, or overflows.
GRADIENTS = {torch.bfloat16: [1.0, 2.0**-10, -1.0, 2.0**-10], torch.float16: [60_000.0, 60_000.0, 0.0, 0.0]}


def added_up(rank: int, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> float:
    mesh = rota.mesh(pp=1, dp=4)
    stages = Stages([Calls(lambda module, x: x * module.weight, weight=nn.Parameter(torch.ones(1, dtype=dtype)))])
    inputs = torch.tensor([[GRADIENTS[dtype][rank]]], dtype=dtype)
    how: Any = {"mesh": mesh, "check_data": "never", "reduce_dtype": reduce_dtype}
    with Pipeline(stages, plan_for(1, "gpipe", 1), lambda y, _: y.sum(), **how) as pipeline:
        pipeline.step(inputs, inputs)
        gradient = next(pipeline.parameters()).grad
    assert gradient.dtype == dtype
    return gradient.item()


@pytest.mark.parametrize("dtype", GRADIENTS)
def test_gradients_of_low_precision_can_be_added_up_in_float32(pool: Pool, dtype: torch.dtype) -> None:
    mean = (torch.tensor(GRADIENTS[dtype]).sum() / 4).to(dtype).item()
    assert pool.run(4, added_up, dtype, torch.float32) == [mean] * 4
    assert mean not in pool.run(4, added_up, dtype, None)


@on_ranks(2)
def test_dtypes_of_sums_that_differ_or_are_not_of_floats_are_refused(rank: int) -> None:
    stages, plan, mesh = chain(1), plan_for(1, "gpipe", 1), rota.mesh(pp=1, dp=2)
    for reduce_dtype, told in (
        (torch.float32 if rank else None, "rank 1 has a different reduce_dtype from rank 0"),
        (torch.int32, "reduce_dtype is torch.int32; give a dtype of floats"),
    ):
        assert told in refusal(Pipeline, stages, plan, loss_fn, mesh=mesh, reduce_dtype=reduce_dtype)


def dropout_losses(rank: int, dp: int, tp: int) -> tuple[list[float], float]:
    """All processes have one batch; the losses of its micro-batches, and the mean that `step` returns."""
    mesh = rota.mesh(pp=1, dp=dp, tp=tp)
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    torch.manual_seed(rank)
    stages = Stages([nn.Sequential(spmd.replicated(layer), nn.Dropout(0.5)).double()])
    plan = plan_for(1, "gpipe", 2)
    with Pipeline(stages, plan, loss_fn, mesh=mesh, check_data="never") as pipeline:
        mean = pipeline.step(*batch_of(2))
        return [*pipeline.losses.values()], mean


def test_dropout_differs_between_replicas_and_is_one_on_all_parts(pool: Pool) -> None:
    (first, mean), (part, part_mean), (second, second_mean), _ = pool.run(4, dropout_losses, 2, 2)
    assert first == part
    assert first != second
    assert mean == part_mean == second_mean == pytest.approx(sum(first + second) / 4, rel=1e-12)


def outputs_of_evaluation(rank: int) -> list[Any]:
    outputs = []
    plan = plan_for(2)
    mesh = rota.mesh(pp=2, dp=2)
    for _ in range(2):
        with Pipeline(chain(2), plan, loss_fn, mesh=mesh) as pipeline:
            batch = part_of(batch_of(8), pipeline)
            pipeline.step(*batch)
            found = pipeline.forward(batch[0], outputs=pipeline.replica == 1 and pipeline.rank == 0)
            outputs.append((pipeline.evaluate(*batch), found and torch.cat(found)))
    return outputs


def test_evaluation_of_replicas(pool: Pool) -> None:
    x, target = batch_of(8)
    expected = chain(2).run(x).detach()
    for process, outputs in enumerate(pool.run(4, outputs_of_evaluation)):
        for loss, found in outputs:
            assert loss == pytest.approx(loss_fn(expected, target).item(), rel=1e-10)
            assert (found is not None) == (process == 2)
            if found is not None:
                torch.testing.assert_close(found, expected.chunk(2)[1], rtol=1e-10, atol=1e-10)


def measured(rank: int, case: Case) -> Timeline:
    plan = plan_of(case)
    with Pipeline(chain(plan.num_stages), plan, loss_fn, mesh=rota.mesh(pp=case.pp, dp=case.dp)) as pipeline:
        for _ in range(2):
            pipeline.step(*part_of(batch_of(8), pipeline))
        return pipeline.timeline()


def test_reductions_in_the_timeline_begin_behind_the_last_gradient_and_overlap_what_is_left(pool: Pool) -> None:
    for schedule in ("1f1b", "interleaved_1f1b"):
        case = Case(schedule, 2, 2)
        plan, by_process = plan_of(case), pool.run(4, measured, case)
        assert by_process[0] == by_process[1]
        assert by_process[2] == by_process[3]
        for timeline in by_process:
            ends = [(rank, timeline.plan.placement.step_ends[i].stage) for i, rank in timeline.plan.step_end_ranks]
            assert {*ends} == {(rank, s) for rank in range(2) for s in plan.placement.stages_on(rank)}
            first = {}
            for (rank, stage), (start, end, *_) in zip(ends, timeline.step_ends_us, strict=True):
                order = plan.orders[rank]
                last = max(i for i, op in enumerate(order) if op.stage == stage and op.kind.makes_weight_gradients)
                assert timeline.ends_us[rank][last] <= start <= end <= timeline.makespan_us
                if rank not in first:  # nothing is to be waited for, then
                    first[rank] = start
                    assert all(start <= other for other in timeline.starts_us[rank][last + 1 :])
            assert Timeline.from_json(timeline.to_json()) == timeline
            compared = compare(plan, timeline)
            assert compared.difference_us == timeline.makespan_us - simulate(plan).makespan_us


@on_ranks(2)
def test_replicas_that_do_not_match_are_refused(rank: int) -> None:
    told, mesh = [], rota.mesh(pp=1, dp=2)
    plan = plan_for(1, "gpipe", 2)
    stages = chain(1)
    stages[0].linear.bias.requires_grad_(rank == 0)
    told.append(refusal(Pipeline, stages, plan, loss_fn, mesh=mesh))
    stages = chain(1)
    with Pipeline(stages, plan, loss_fn, mesh=mesh, check_data="never") as pipeline:
        pipeline.step(*batch_of(2))
        stages[0].linear.weight.requires_grad_(rank == 0)
        told.append(refusal(pipeline.step, *batch_of(2)))
    embedding = Stages([nn.Sequential(nn.Embedding(4, 6, sparse=True), nn.Linear(6, 6))])
    with Pipeline(embedding, plan, loss_fn, mesh=mesh, check_data="never") as pipeline:
        told.append(refusal(pipeline.step, torch.arange(4), torch.zeros(4, 6)))
    for text, number in zip(told, (1, 0), strict=False):
        assert "on this rank replica 1 has 2 parameters and buffers and trains 1, replica 0 has 2 and" in text
        assert f"they differ from number {number} on" in text
    assert "of shape [4, 6] has a sparse gradient, which is not reduced over processes" in told[2]
