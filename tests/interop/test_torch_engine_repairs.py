"""Where PyTorch's engine alone goes wrong, told by nobody, and what TorchEngine makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, place
from rota.interop import TorchEngine
from rota.schedules import NAMED
from support.engine_runs import (
    WHOLE,
    Batches,
    assert_right,
    gradients,
    plan_of,
    run_made,
    steps,
    two_layers,
    wrong_alone,
)
from support.networks import WIDTH, Layer, assert_equal_steps, batch_of, chain, loss_fn, serial_step
from support.plain_torch import plain_steps
from support.pool import Pool

pytestmark = pytest.mark.dist

FORWARDS_OUT_OF_ORDER = plan_of("0F1 0F0 0B1 0B0", "1F1 1F0 1B1 1B0")

# --- losses and scales ------------------------------------------------------------------------------------------------


def test_forwards_of_the_last_stage_out_of_order(pool: Pool) -> None:
    assert wrong_alone(pool, two_layers, FORWARDS_OUT_OF_ORDER, [batch_of(2)]) == {"0.linear.weight", "0.linear.bias"}
    assert_right(pool, two_layers, FORWARDS_OUT_OF_ORDER)


def test_outputs_are_in_order(pool: Pool) -> None:
    batch = batch_of(2)
    right = chain(2).run(batch[0])
    ((_, output),) = pool.run(
        2, plain_steps, FORWARDS_OUT_OF_ORDER.to_csv(communication=True), [*chain(2).modules], [0, 1], 2, [batch]
    )[1]
    assert not torch.allclose(output, right)
    ours = pool.run(2, outputs_of, FORWARDS_OUT_OF_ORDER, [batch, batch_of(2, 2)])[1]
    torch.testing.assert_close(ours, right.detach(), rtol=1e-10, atol=1e-10)


def outputs_of(rank: int, plan: Plan, batches: Batches) -> Tensor | None:
    """Those of the first step, looked at after the last: the last stage returns what it received."""
    stages = Stages([nn.Sequential(*chain(2).modules), nn.Identity()])
    with TorchEngine(stages, plan, loss_fn, keep_outputs=True) as engine:
        kept = []
        for batch in batches:
            engine.step(*batch)
            kept.append(engine.outputs)
    return torch.cat([kept[0][m].detach() for m in sorted(kept[0])]) if kept[0] else None


def test_steps_that_add_to_gradients(pool: Pool) -> None:
    batches = [batch_of(2, seed) for seed in (1, 2)]
    assert len(wrong_alone(pool, two_layers, WHOLE, batches)) == 4
    assert not wrong_alone(pool, two_layers, WHOLE, batches[:1])
    by_rank = pool.run(2, run_adding, WHOLE, batches)
    ours = {f"{stage}.{name}": gradient for results in by_rank for (stage, name), gradient in results.items()}
    *_, right = gradients(chain(2), batches)
    for name, gradient in right.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-10)


def run_adding(rank: int, plan: Plan, batches: Batches) -> Any:
    return steps(TorchEngine, rank, chain(2), plan, batches, clear=False)[-1].gradients


# --- state ------------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = Layer().double(), nn.BatchNorm1d(WIDTH).double(), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.norm(self.layer(x)))
        return result


def norm_on(rank: int, engine: Any, plan: Plan) -> Any:
    """Losses, gradients and buffers of two steps with an evaluation between them."""
    torch.manual_seed(3)
    stages = Stages([Norm(), Norm()])
    outlook = NAMED["forward_only"](plan.placement.forward_only(), plan.num_microbatches)
    with engine(stages, plan, loss_fn) as trains, engine(stages, outlook, None) as evaluates:
        losses = [trains.step(*batch_of(2, 1))]
        evaluates.step(batch_of(2, 2)[0])
        losses += [trains.step(*batch_of(2, 3)), *trains.losses.values()]
        local = trains.local_stages
        return (
            losses,
            [parameter.grad for module in local.values() for parameter in module.parameters()],
            [buffer for module in local.values() for buffer in module.buffers()],
        )


def test_buffers_dropout_and_evaluations_between_steps(pool: Pool) -> None:
    theirs, ours = (pool.run(2, norm_on, engine, WHOLE) for engine in (TorchEngine, Pipeline))
    torch.testing.assert_close(theirs, ours, rtol=1e-10, atol=1e-10)


# --- weights of several stages ----------------------------------------------------------------------------------------


def tied() -> Stages:
    stages = chain(2)
    stages[1].linear.weight = stages[0].linear.weight
    return stages


def test_tied_weights(pool: Pool) -> None:
    assert wrong_alone(pool, tied, WHOLE, [batch_of(2)]) == {"0.linear.weight", "1.linear.weight"}
    with pytest.raises(PipelineError, match=r"tied to .linear\.weight. of stage 0 on rank 0"):
        TorchEngine(tied(), WHOLE, loss_fn)
    placement = place(Costs.uniform(2), Cluster.uniform(2), [1, 1])
    plan = NAMED["gpipe"](placement, 2)
    results = pool.run(2, run_made, tied, plan, [batch_of(2)])
    assert_equal_steps([each[0] for each in results], serial_step(tied(), *batch_of(2)))
