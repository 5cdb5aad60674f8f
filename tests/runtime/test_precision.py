"""Autocast and gradient scalers give, bit by bit, what they give the unsplit model."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Cluster, Costs, Pipeline, Plan, Stages, place, spmd
from rota.schedules import NAMED
from support.meshed import Case, assert_trains_as_unsplit, plan_of, sharded
from support.networks import StepResult, chain, clear, cleared_step, gradients_of, loss_fn, refusal
from support.odd_stages import Calls
from support.parallel_modules import GatheredLayer, ParallelLayer
from support.pool import Pool, on_ranks

NUM_MICROBATCHES, ROWS, WIDTH = 6, 4, 8
Dtype = torch.dtype | None  # of autocast; None: off


def precise(stage: Any, x: Tensor) -> Tensor:
    """A layer that autocast must leave alone: its backward would be rounded if that ran under autocast."""
    with torch.autocast("cpu", enabled=False):
        return stage.linear(x.float())


def make_stages(num_stages: int) -> Stages:
    """The boundaries carry the low precision, or float32 behind a norm."""
    torch.manual_seed(0)

    def linear() -> nn.Linear:
        return nn.Linear(WIDTH, WIDTH)

    def precise_linear() -> nn.Module:
        return Calls(precise, linear=linear())

    kinds = (
        lambda: nn.Sequential(linear(), nn.GELU(), precise_linear(), linear()),
        lambda: nn.Sequential(linear(), nn.Tanh(), nn.LayerNorm(WIDTH)),
        lambda: nn.Sequential(nn.Dropout(0.0), precise_linear(), nn.Tanh(), linear()),
    )
    return Stages([kinds[i % 3]() for i in range(num_stages)])


def batch_of(seed: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, NUM_MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, y


def autocast(dtype: Dtype) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def serial_step(stages: Stages, batch: tuple[Tensor, Tensor], dtype: Dtype) -> StepResult:
    """The unsplit model, micro-batch by micro-batch; backwards are outside of autocast, as torch advises."""
    total = 0.0
    clear(stages)
    for x, y in zip(*(part.chunk(NUM_MICROBATCHES) for part in batch), strict=True):
        with autocast(dtype):
            loss = loss_fn(stages.run(x), y)
        (loss * (1 / NUM_MICROBATCHES)).backward()
        total += loss.item() / NUM_MICROBATCHES
    return StepResult(total, gradients_of(stages, range(len(stages))))


MODES: list[Dtype] = [torch.bfloat16, None, torch.float16, torch.bfloat16]  # as the steps have it, one after the other


def plan_for(schedule: str, num_ranks: int, **more: Any) -> Plan:
    family = NAMED[schedule]
    costs = family.costs_from(Costs.uniform(num_ranks, 10, 10, weight_us=8, activation_bytes=8))
    if more:
        return family(place(Costs.uniform(num_ranks, 10, 20, **more), Cluster.uniform(num_ranks)), NUM_MICROBATCHES)
    return family(family.place(costs, Cluster.uniform(num_ranks)), NUM_MICROBATCHES)


def steps_of(rank: int, cases: list[tuple[Plan, str]]) -> list[list[StepResult]]:
    results: list[list[StepResult]] = []
    for plan, recompute in cases:
        results.append([])
        with Pipeline(make_stages(plan.num_stages), plan, loss_fn, recompute=recompute) as pipeline:
            for seed, dtype in enumerate(MODES):
                with autocast(dtype):
                    results[-1].append(cleared_step(pipeline, *batch_of(seed)))
    return results


def test_autocast(pool: Pool) -> None:
    num_ranks = 2
    cases = [(plan_for(name, num_ranks), "none") for name in ("1f1b", "zb_h1", "interleaved_1f1b", "zb_v")]
    cases.append((plan_for("1f1b", num_ranks, recompute_us=1), "none"))
    cases.append((plan_for("zb_h1", num_ranks), "full"))
    by_rank = pool.run(num_ranks, steps_of, cases)
    for case, (plan, _) in enumerate(cases):
        stages = make_stages(plan.num_stages)
        for step, dtype in enumerate(MODES):
            serial = serial_step(stages, batch_of(step), dtype)
            of_ranks = [results[case][step] for results in by_rank]
            assert [result.loss for result in of_ranks] == pytest.approx([serial.loss] * num_ranks, rel=1e-15)
            found = {key: gradient for result in of_ranks for key, gradient in result.gradients.items()}
            torch.testing.assert_close(found, serial.gradients, rtol=0, atol=0)


@on_ranks(2)
def test_weights_that_autocast_has_cached_do_not_outlive_a_step(rank: int) -> None:
    with Pipeline(make_stages(2), plan_for("1f1b", 2), loss_fn) as pipeline, autocast(torch.bfloat16):
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
        losses, evaluated = [], []
        for seed in range(3):
            evaluated.append(pipeline.evaluate(*batch_of(seed)))
            losses.append(pipeline.step(*batch_of(seed)))
            optimizer.step()
            optimizer.zero_grad()
    stages, expected = make_stages(2), []
    optimizer = torch.optim.SGD([p for _, p in stages.named_parameters()], lr=0.5)
    for seed in range(3):
        expected.append(serial_step(stages, batch_of(seed), torch.bfloat16).loss)
        optimizer.step()
    assert losses == evaluated == pytest.approx(expected, rel=1e-15)


BROKEN = 6  # the step in which one weight's gradient is made infinite


def stages_to_scale() -> Stages:
    """The last one has no weights, and makes the loss."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return Stages([*layers, nn.Tanh()])


def break_one_gradient(stages: Stages, step: list[int]) -> None:
    """Of stage 1 alone; `step` is what the caller counts."""
    weight = stages[1].get_parameter("0.bias")
    weight.register_hook(lambda g: torch.full_like(g, torch.inf) if step[0] == BROKEN else g)


@on_ranks(3)
def test_the_last_step_of_a_round_decides_for_all_of_it(rank: int) -> None:
    """Two steps, of which the first makes an infinite gradient on rank 0, and one that does not look at it."""
    stages, step = stages_to_scale(), [BROKEN]
    break_one_gradient(stages, step)
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=8.0), []
    with Pipeline(stages, plan_for("1f1b", 3), loss_fn) as pipeline:
        for step[0], sync in ((BROKEN, False), (0, True)):
            pipeline.step(*batch_of(0), scale=0.5, sync=sync, scaler=scaler)
            finite = all(bool(p.grad.isfinite().all()) for p in pipeline.parameters() if p.grad is not None)
            seen.append((scaler.get_scale(), finite))
        scaler.update()
        expected = [
            [(8.0, True), (8.0, False), 4.0],
            [(8.0, False), (8.0, False), 4.0],
            [(8.0, True), (8.0, True), 4.0],  # no gradients
        ]
        assert [*seen, scaler.get_scale()] == expected[rank]


def what_is_told(rank: int, plan: Plan, case: str) -> str:
    stages = stages_to_scale()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 if case == "scale" and rank == 1 else 8.0)
    with Pipeline(stages, plan, loss_fn) as pipeline:
        if case == "update":
            pipeline.step(*batch_of(0), scaler=scaler)
        return refusal(pipeline.step, *batch_of(0), scaler=None if case == "none" and rank == 1 else scaler)


def test_scalers_that_differ_or_are_not_updated_are_refused(pool: Pool) -> None:
    plan = plan_for("1f1b", 3)
    assert all("scalers differ (scales 4 and 8)" in told for told in pool.run(3, what_is_told, plan, "scale"))
    assert all("scale 8, and none on some rank" in told for told in pool.run(3, what_is_told, plan, "none"))
    assert all("call scaler.update() after it" in told for told in pool.run(3, what_is_told, plan, "update"))


# --- trainings on any mesh, with recomputation and compiled stages too ------------------------------------------------


def cases_on(pp: int, dp: int) -> list[Case]:
    return [
        Case("1f1b", pp, dp, dtype=torch.float16),
        Case("zb_h1", pp, dp, dtype=torch.float16, recompute="full"),
        Case("zb_h1", pp, dp, dtype=torch.bfloat16),
        Case("1f1b", pp, dp, recompute="full"),
        Case("zb_h1", pp, dp, recompute="full", compiled=True),
        Case("interleaved_1f1b", pp, dp),
    ]


def stages_on_mesh(case: Case, group: spmd.Group) -> Stages:
    """A chain, whose last stage has no weights where there are three; or stages in parts."""
    num_stages = plan_of(case).num_stages
    if case.tp > 1:
        first, last = ParallelLayer(0, group), ParallelLayer(2, group)
        last.down = first.down if case.tied else last.down
        stages = Stages([first, nn.Sequential(GatheredLayer(1, group), last)])
    else:
        layers = [*chain(num_stages).modules]
        stages = Stages([*layers[:2], nn.Tanh()] if num_stages == 3 else layers)
    for module in stages.modules:
        module.to(case.stored_dtype)
        if case.compiled:
            module.compile(backend="aot_eager")
    return stages


@pytest.mark.parametrize(("pp", "dp"), [(2, 2), (3, 1), pytest.param(3, 2, marks=pytest.mark.sweep)])
def test_pipelines_and_replicas(pool: Pool, pp: int, dp: int) -> None:
    assert_trains_as_unsplit(pool, stages_on_mesh, cases_on(pp, dp))


def test_pipeline_and_tensor_and_replicas(pool: Pool) -> None:
    cases = [case._replace(tp=2) for case in cases_on(2, 2)[1:3]]
    cases += [Case("zb_h1", 2, 2, tp=2, tied=True), Case("zb_h1", 2, 2, sharded, tp=2)]
    pool.renew()
    assert_trains_as_unsplit(pool, stages_on_mesh, cases)


def test_sharded_stages(pool: Pool) -> None:
    cases = [Case("1f1b", 2, 2, sharded, dtype=torch.float16), Case("zb_h1", 2, 2, sharded, recompute="full")]
    pool.renew()
    assert_trains_as_unsplit(pool, stages_on_mesh, cases)
