"""Clipping by the norm of the whole model, of any type, wherever its weights are."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rota
from rota import Cluster, Costs, Pipeline, PipelineError, Stages, place
from rota.schedules import gpipe
from support.meshed import part_of
from support.networks import WIDTH, Layer, batch_of, loss_fn, refusal
from support.odd_stages import Calls
from support.pool import Pool

NORM_TYPES = (0.5, 1, 2, 3, 7.5, math.inf)


def stages_of(fill: float | None = None) -> Stages:
    """A weight tied over the ends, none between them; with `fill` one gradient is full of that."""
    torch.manual_seed(0)
    first, last = Layer().double(), Layer().double()
    last.linear.weight = first.linear.weight
    if fill is not None:

        def hook(parameter: nn.Parameter) -> None:
            parameter.grad.fill_(fill)

        last.linear.bias.register_post_accumulate_grad_hook(hook)
    return Stages([first, nn.Tanh(), last])


class Clipped(NamedTuple):
    norm: float
    gradients: list[Tensor | None]


def gradients_after(stages: Stages, which: tuple[int, ...]) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for stage in which for p in stages[stage].parameters()]


def clipped(rank: int, fills: list[float | None], max_norm: float) -> tuple[list[Clipped], list[str]]:
    """Each norm type on the same gradients, for each fill; and what is told where the norm is not finite."""
    found, told = [], []
    plan = gpipe(place(Costs.uniform(3), Cluster.uniform(3)), 4)
    for fill in fills:
        for norm_type in NORM_TYPES:
            stages = stages_of(fill)
            with Pipeline(stages, plan, loss_fn) as pipeline:
                pipeline.step(*batch_of(4))
                if fill is not None and norm_type in (1, math.inf):
                    told.append(refusal(pipeline.clip_grad_norm_, max_norm, norm_type, error_if_nonfinite=True))
                norm = pipeline.clip_grad_norm_(max_norm, norm_type)
                assert (norm.dtype, norm.shape) == (torch.float64, ())
                found.append(Clipped(norm.item(), gradients_after(stages, (rank,))))
    with Pipeline(stages_of(), plan, loss_fn) as pipeline:
        for norm_type in (0, -1, math.nan):
            with pytest.raises(PipelineError, match=f"norm_type is {norm_type}; give a number above 0, or inf"):
                pipeline.clip_grad_norm_(1.0, norm_type)
        for given, words in (
            (lambda: pipeline.clip_grad_norm_("x"), "max_norm is 'x'; give a number"),
            (lambda: pipeline.clip_grad_norm_(1.0, "x"), "norm_type is 'x'; give a number"),
            (lambda: pipeline.step(*batch_of(4), scaler=1), "scaler is 1; give a torch.amp.GradScaler, or None"),
            (lambda: pipeline.step(*batch_of(4), scale="x"), "scale is 'x'; give a number above 0"),
        ):
            with pytest.raises(PipelineError, match=words):
                given()
        assert pipeline.clip_grad_norm_(1.0) == 0  # no rank has a gradient
    return found, told


def test_norms_of_any_type_are_torchs_of_the_whole_model(pool: Pool) -> None:
    fills: list[float | None] = [None, math.nan, math.inf]
    by_rank = pool.run(3, clipped, fills, 0.25)
    cases = [(fill, norm_type) for fill in fills for norm_type in NORM_TYPES]
    for i, (fill, norm_type) in enumerate(cases):
        serial = stages_of(fill)
        x, target = batch_of(4)
        loss_fn(serial.run(x), target).backward()
        expected = nn.utils.clip_grad_norm_(nn.ModuleList(serial.modules).parameters(), 0.25, norm_type).item()
        for rank, (found, _) in enumerate(by_rank):
            torch.testing.assert_close(found[i].norm, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
            own = gradients_after(serial, (rank,))
            torch.testing.assert_close(found[i].gradients, own, rtol=1e-10, atol=1e-10, equal_nan=True)
    for _, told in by_rank:
        assert [text.split(",")[0] for text in told] == ["the norm of the gradients is nan"] * 2 + [
            "the norm of the gradients is inf"
        ] * 2


def complex_layer() -> nn.Module:
    """Sends complex values on."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))
    scale = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
    return Calls(lambda s, x: (x.to(torch.complex128) @ s.weight).tanh() * s.scale, weight=weight, scale=scale)


def complex_stages() -> Stages:
    """A complex weight is tied over the ends."""
    torch.manual_seed(0)
    stages = Stages([complex_layer() for _ in range(3)])
    stages[2].weight = stages[0].weight
    return stages


def absolute_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().square().mean()


def clipped_complex(rank: int, num_replicas: int) -> list[Clipped]:
    found = []
    for weight_us in (None, 1):
        plan = gpipe(place(Costs.uniform(3, weight_us=weight_us), Cluster.uniform(2), [0, 1, 1]), 2)
        for norm_type in NORM_TYPES:
            stages, mesh = complex_stages(), rota.mesh(pp=2, dp=num_replicas)
            with Pipeline(stages, plan, absolute_loss, mesh=mesh) as pipeline:
                pipeline.step(*part_of(batch_of(2 * num_replicas), pipeline))
                norm = pipeline.clip_grad_norm_(0.1, norm_type).item()
                found.append(Clipped(norm, gradients_after(stages, tuple(pipeline.local_stages))))
    return found


def test_complex_weights(pool: Pool) -> None:
    num_replicas = 2
    by_process = pool.run(2 * num_replicas, clipped_complex, num_replicas)
    for case, norm_type in enumerate(NORM_TYPES * 2):
        stages = complex_stages()
        inputs, targets = batch_of(2 * num_replicas)
        absolute_loss(stages.run(inputs), targets).backward()
        norm = nn.utils.clip_grad_norm_([p for _, p in stages.named_parameters()], 0.1, norm_type)
        for process, results in enumerate(by_process):
            expected = gradients_after(stages, (0,) if process % 2 == 0 else (1, 2))
            torch.testing.assert_close(results[case].norm, norm.item(), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(results[case].gradients, expected, rtol=1e-10, atol=1e-10)
