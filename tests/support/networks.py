"""Small models, and the comparison of a pipeline's step with the unsplit model's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from rota import Cluster, Costs, Kind, Pipeline, PipelineError, Plan, Stages, bidirectional, place
from rota.schedules import FAMILIES, NAMED
from support.device_orders import family_plans
from support.pool import LIMIT_S

ROWS, WIDTH = 5, 6


class Layer(nn.Module):
    """Sums whatever comes in, then a layer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.stack(values).sum(0))) + values[0]


def graph_of_layers(num_stages: int, edges: list[tuple[int, int]], seed: int = 0) -> Stages:
    """One layer a stage, joined by `edges`; sources read the batch."""
    torch.manual_seed(seed)
    return Stages([Layer().double() for _ in range(num_stages)], edges=edges)


def chain(num_stages: int) -> Stages:
    return graph_of_layers(num_stages, [(i, i + 1) for i in range(num_stages - 1)])


class Stage(nn.Module):
    """A layer and what a function makes of it and the received values."""

    def __init__(self, function: Callable[..., Any], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(self.linear, *values)


def stages_of(*functions: Callable[..., Any], **wiring: Any) -> Stages:
    return Stages([Stage(function, seed) for seed, function in enumerate(functions)], **wiring)


def plan_for(num_ranks: int, schedule: str = "1f1b", num_microbatches: int = 4, **costs: Any) -> Plan:
    """For a chain of one stage per rank."""
    return NAMED[schedule](place(Costs.uniform(num_ranks, **costs), Cluster.uniform(num_ranks)), num_microbatches)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


@dataclass
class StepResult:
    """What one rank saw, or what the unsplit model gives: gradients by (stage, parameter name)."""

    loss: float
    gradients: dict[tuple[int, str], torch.Tensor]


def rows_of(num_rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(num_rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return inputs, targets


def batch_of(num_microbatches: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return rows_of(num_microbatches * ROWS, seed)


def gradients_of(stages: Stages, stage_numbers: Any) -> dict[tuple[int, str], torch.Tensor]:
    """Copies; of a sharded parameter the whole."""
    named = ((stage, name, p.grad) for stage in stage_numbers for name, p in stages[stage].named_parameters())
    return {
        (stage, name): (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
        for stage, name, grad in named
        if grad is not None
    }


def clear(trained: Stages | Pipeline) -> None:
    """As `zero_grad` does: no gradients are left."""
    for _, parameter in trained.named_parameters():
        parameter.grad = None


def serial_step(stages: Stages, inputs: Any, targets: Any) -> StepResult:
    """The unsplit model on the whole batch."""
    loss = loss_fn(stages.run(inputs), targets)
    loss.backward()
    return StepResult(loss.item(), gradients_of(stages, range(len(stages))))


def serial_microbatches(
    stages: Stages, batch: Any, num_microbatches: int, loss_fn: Callable[..., torch.Tensor] = loss_fn
) -> StepResult:
    """The unsplit model on one micro-batch after another, as a plan has them: where rows mix, or each bit counts."""
    clear(stages)
    total = 0.0
    for x, target in zip(*(part.chunk(num_microbatches) for part in batch), strict=True):
        loss = loss_fn(stages.run(x), target) / num_microbatches
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    return StepResult(total, gradients_of(stages, range(len(stages))))


def cleared_step(pipeline: Pipeline, *batch: Any, **options: Any) -> StepResult:
    """A step of a pipeline on this rank, whose gradients are that step's alone."""
    clear(pipeline)
    loss = pipeline.step(*batch, **options)
    return StepResult(loss, gradients_of(pipeline.stages, pipeline.local_stages))


def pipeline_steps(rank: int, stages: Stages, plan: Plan, batches: list[Any], **options: Any) -> list[StepResult]:
    """On each rank: the steps of a pipeline, gradients cleared between them."""
    with Pipeline(stages, plan, loss_fn, **options) as pipeline:
        return [cleared_step(pipeline, *batch) for batch in batches]


Cases = Sequence[tuple[Stages, Plan, Sequence[Any]]]  # with the batches of a case's steps


def steps_of_each(rank: int, cases: Cases, options: dict[str, Any]) -> list[list[StepResult]]:
    return [pipeline_steps(rank, *case, **options) for case in cases]


def family_cases(num_ranks: int) -> Cases:
    """A case of each family of one stream, but for chunks of samples, which need a model whose attention knows them."""
    families = [family for family in FAMILIES if family.name != "seq1f1b" and family.place is not bidirectional]
    plans = [[*family_plans([family], [num_ranks])][:2][-1] for family in families]
    return [(chain(plan.num_stages), plan, [batch_of(plan.num_microbatches, s) for s in (1, 2)]) for plan in plans]


def trains(plan: Plan) -> bool:
    return any(task.kind is not Kind.F for task in plan.placement.tasks)


def assert_as_unsplit(
    pool: Any, num_ranks: int, cases: Cases, *, by_microbatches: bool = False, **options: Any
) -> None:
    """Each step of each case has the unsplit model's loss and gradients; `options`: of the pipelines."""
    by_rank = pool.run(num_ranks, steps_of_each, cases, options, timeout_s=LIMIT_S + 3 * len(cases))
    for case, (stages, plan, batches) in enumerate(cases):
        for step, batch in enumerate(batches):
            serial = serial_microbatches(stages, batch, plan.num_microbatches if by_microbatches else 1)
            if not trains(plan):
                serial.gradients.clear()
            assert_equal_steps([results[case][step] for results in by_rank], serial)


def assert_equal_steps(by_rank: list[StepResult], serial: StepResult, tolerance: float = 1e-10) -> None:
    """Every rank has the serial loss; all gradients are somewhere, and equal wherever they are."""
    keys: set[tuple[int, str]] = set()
    for result in by_rank:
        assert abs(result.loss - serial.loss) <= tolerance
        keys |= result.gradients.keys()
        expected = {key: serial.gradients[key] for key in result.gradients}
        torch.testing.assert_close(result.gradients, expected, rtol=tolerance, atol=tolerance)
    assert keys == serial.gradients.keys()


def refusal(act: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """What a call is told that must be refused."""
    with pytest.raises(PipelineError) as error:
        act(*arguments, **options)
    return str(error.value)
