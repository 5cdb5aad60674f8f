"""Weights of a loss_fn belong to no stage and are refused; as the model's last module they are trained."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rota
from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, place
from rota.schedules import NAMED
from support import ROOT
from support.networks import WIDTH, Layer, batch_of, chain, loss_fn, refusal
from support.pool import Pool, on_ranks

PAGE = ROOT / "docs" / "data.md"


class Projected(nn.Module):
    """A loss with weights of its own."""

    def __init__(self, *, trains: bool = True) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.proj = nn.Linear(WIDTH, WIDTH).double().requires_grad_(trains)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return loss_fn(self.proj(output), target)


class Holder:
    """Not a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.module(output, target)


def learned_scale(output: Tensor, target: Tensor, *, log_scale: Tensor) -> Tensor:
    output *= 2  # its gradient enters the graph elsewhere from now on
    return loss_fn(output * log_scale.exp(), target)


def in_closure(module: nn.Module) -> Callable[..., Tensor]:
    return lambda output, target: module(output, target)


def of_stage(stages: Stages, stage: int) -> Callable[..., Tensor]:
    weight = stages[stage].linear.weight
    return lambda output, target: loss_fn(output @ weight, target)


def of_teacher(module: Projected) -> Callable[..., Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = module.proj(target)
        return loss_fn(output, wanted)

    return loss


REFUSED: dict[str, tuple[Callable[[Stages], Any], str]] = {
    "module": (lambda _: Projected(), r"loss_fn is a Projected with weights of its own \('proj.weight' and 1 more\)"),
    "closure": (lambda _: in_closure(Projected()), r"a weight of shape \[6.*belongs to no stage"),
    "partial": (
        lambda _: partial(learned_scale, log_scale=torch.zeros((), dtype=torch.float64, requires_grad=True)),
        r"a weight of shape \[\] that belongs to no stage",
    ),
    "method": (lambda _: Holder(Projected()).loss, r"a weight of shape \[6.*belongs to no stage"),
    "another stage's": (lambda stages: of_stage(stages, 0), "'linear.weight' of stage 0, which stage 1, the last one"),
}

ACCEPTED: dict[str, Callable[[Stages], Any]] = {
    "frozen": lambda _: Projected(trains=False),
    "without gradients": lambda _: of_teacher(Projected()),
    "the last stage's": lambda stages: of_stage(stages, 1),
    "no weights": lambda _: nn.MSELoss(),
}


def plan_on(num_ranks: int, weight_us: int | None = None) -> Plan:
    costs = Costs.uniform(2, weight_us=weight_us)
    return NAMED["gpipe"](place(costs, Cluster.uniform(num_ranks), [0, num_ranks - 1]), 2)


def one_step(case: str, weight_us: int | None) -> None:
    stages = chain(2)
    with Pipeline(stages, plan_on(1, weight_us), REFUSED[case][0](stages)) as pipeline:
        pipeline.step(*batch_of(2))


@on_ranks(1)
def test_refused_at_the_latest_in_the_first_step(rank: int) -> None:
    for case, inputs in [*((case, None) for case in REFUSED), ("module", 1)]:
        error = refusal(one_step, case, inputs)
        assert re.search(REFUSED[case][1], error)
        assert "make it the model's last module" in error


@on_ranks(1)
def test_accepted(rank: int) -> None:
    for make in ACCEPTED.values():
        stages = chain(2)
        with Pipeline(stages, plan_on(1), make(stages)) as pipeline:
            loss, gradients = pipeline.step(*batch_of(2)), [parameter.grad for parameter in pipeline.parameters()]
        stages = chain(2)
        x, target = batch_of(2)
        expected = make(stages)(stages.run(x), target)
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=1e-10)
        serial = [parameter.grad for module in stages.modules for parameter in module.parameters()]
        torch.testing.assert_close(gradients, serial, rtol=1e-10, atol=1e-10)


def test_verify_refuses_it() -> None:
    stages = chain(2)
    stages.unsplit = nn.Sequential(*stages.modules)
    loss = Projected()
    with pytest.raises(PipelineError, match="belongs to no stage"):
        rota.verify(stages, *batch_of(2), loss_fn=lambda o, t: loss(o, t))


def with_loss() -> nn.Module:
    """By the module of docs/data.md."""
    (module,) = re.findall(r"```python\n(class WithLoss.*?)\n\n\nstages = ", PAGE.read_text(), flags=re.DOTALL)
    space: dict[str, Any] = {"nn": nn}
    exec(module, space)
    torch.manual_seed(0)
    model: nn.Module = space["WithLoss"](nn.Sequential(*(Layer().double() for _ in range(3))), Projected())
    return model


def trained(rank: int) -> tuple[dict[str, Tensor], list[float]]:
    mesh = rota.mesh(pp=2, dp=2)
    with Pipeline(
        rota.split(with_loss(), 2, example=batch_of(1)), plan_on(2), lambda loss: loss, mesh=mesh
    ) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
        norms = []
        for step in range(2):
            pipeline.step(tuple(part.chunk(2)[pipeline.replica] for part in batch_of(4, step)))
            norms.append(pipeline.clip_grad_norm_(0.1).item())
            optimizer.step()
            optimizer.zero_grad()
        return {name: parameter.detach() for name, parameter in pipeline.named_parameters()}, norms


def test_a_loss_as_the_models_last_module_is_named_clipped_and_equal_on_replicas(pool: Pool) -> None:
    model = with_loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for step in range(2):
        model(*batch_of(4, step)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    expected, names = model.state_dict(), set()
    for weights, of_rank in pool.run(4, trained):
        assert of_rank == pytest.approx(norms, rel=1e-10)
        names |= weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=1e-10)
    assert names == expected.keys()
