"""Stages that torch.compile made give the unsplit model's gradients: whole, in I and W, and recomputed."""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Pipeline, Plan, Stages
from support.networks import WIDTH, batch_of, cleared_step, loss_fn, plan_for, serial_microbatches
from support.pool import Pool

NUM_MICROBATCHES, NUM_STEPS = 4, 3
PATIENT_S = 600.0  # a busy machine takes minutes to compile a stage, and its neighbours wait for the first micro-batch
Step = tuple[float, dict[tuple[int, str], Tensor]]


class Block(nn.Module):
    """`layers` one after another; `nn.Sequential.compile()` compiles nothing, as its forward is torch's own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make_stages(num_stages: int, dtype: torch.dtype) -> Stages:
    """With statistics of the micro-batch in every other one."""
    torch.manual_seed(3)
    kinds = (
        lambda: Block(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
        lambda: Block(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH)),
    )
    return Stages([kinds[stage % 2]().to(dtype) for stage in range(num_stages)])


def state_of(stages: Stages, which: Any) -> dict[tuple[int, str], Tensor]:
    """Gradients and buffers, by the name that they have without torch.compile."""
    named = {(stage, name): p.grad for stage in which for name, p in stages[stage].named_parameters()}
    named |= {(stage, name): b for stage in which for name, b in stages[stage].named_buffers()}
    return {(stage, name.removeprefix("_orig_mod.")): t.clone() for (stage, name), t in named.items() if t is not None}


def steps_of(rank: int, cases: list[tuple[Plan, str]], backend: str, autocast: bool, wrapped: bool) -> list[list[Step]]:
    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1  # in this process, not in a pool of its own
    dtype, results = torch.float32 if autocast else torch.float64, []
    for plan, recompute in cases:
        stages = make_stages(plan.num_stages, dtype)
        if wrapped:
            stages = Stages([torch.compile(module, backend=backend) for module in stages.modules])
        else:
            for module in stages.modules:
                module.compile(backend=backend)
        results.append([])
        with Pipeline(stages, plan, loss_fn, recompute=recompute, timeout_s=PATIENT_S) as pipeline:
            for seed in range(NUM_STEPS):
                batch = [t.to(dtype) for t in batch_of(NUM_MICROBATCHES, seed)]
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = cleared_step(pipeline, *batch).loss
                results[-1].append((loss, state_of(stages, pipeline.local_stages)))
    return results


def serial_steps(num_stages: int, autocast: bool) -> list[Step]:
    """Not compiled, micro-batch by micro-batch, since statistics are those of one."""
    dtype = torch.float32 if autocast else torch.float64
    stages, results = make_stages(num_stages, dtype), []
    for seed in range(NUM_STEPS):
        batch = [t.to(dtype) for t in batch_of(NUM_MICROBATCHES, seed)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = serial_microbatches(stages, batch, NUM_MICROBATCHES).loss
        results.append((loss, state_of(stages, range(num_stages))))
    return results


def assert_equal(by_rank: list[list[list[Step]]], serial: list[Step], **tolerance: float) -> None:
    for case in range(len(by_rank[0])):
        for step, (loss, expected) in enumerate(serial):
            found = {key: value for results in by_rank for key, value in results[case][step][1].items()}
            torch.testing.assert_close(found, expected, **tolerance)
            for results in by_rank:
                torch.testing.assert_close(results[case][step][0], loss, **tolerance)


def test_compiled_stages(pool: Pool) -> None:
    cases = [
        (plan_for(2), "none"),
        (plan_for(2, "zb_h1", weight_us=10), "none"),
        (plan_for(2, "zb_h1", weight_us=10, recompute_us=10), "none"),
        (plan_for(2, "zb_h1", weight_us=10), "full"),
    ]
    found = pool.run(2, steps_of, cases, "aot_eager", False, False)
    assert_equal(found, serial_steps(2, autocast=False), rtol=1e-10, atol=1e-10)
    found = pool.run(2, steps_of, cases[1:3], "aot_eager", True, True)
    assert_equal(found, serial_steps(2, autocast=True), rtol=3e-2, atol=3e-2)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and finds no g++")
@pytest.mark.sweep
def test_inductor(pool: Pool) -> None:
    cases = [(plan_for(2, "zb_h1", weight_us=10), "none")]
    found = pool.run(2, steps_of, cases, "inductor", False, True, timeout_s=PATIENT_S)
    assert_equal(found, serial_steps(2, autocast=False), rtol=1e-10, atol=1e-10)
