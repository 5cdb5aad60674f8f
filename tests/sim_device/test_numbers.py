"""Losses, counts, metrics, scalers and norms on simulated devices: the CPU's values, and no wait of the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rota
from rota import Pipeline, PipelineError
from rota.runtime.precision import ambient_autocast, without_autocast
from runtime import test_losses, test_step_handles
from runtime.reducing import test_norms
from runtime.test_nonfinite_loss import batch_with
from runtime.test_step_handles import APPLIED, FORMS, N, losses_by_name, stages_for
from support.networks import batch_of, chain, clear, loss_fn, plan_for, refusal
from support.pool import Pool
from support.sim_device import SimDevice, current_device
from support.sim_device.groups import READ
from support.sim_device.pool import SimPool


@pytest.fixture
def sim_pool(pool: Pool) -> SimPool:
    return SimPool(pool)


@pytest.mark.dist
@pytest.mark.parametrize(
    "test",
    [
        test_losses.test_metrics_may_come_later,
        test_losses.test_refused_on_all_ranks,
        test_losses.test_low_precision_does_not_overflow,
        test_losses.test_added_losses_of_replicas,
        test_losses.test_a_stage_may_be_trained_by_its_added_loss_alone,
        test_step_handles.test_all_ranks_wait_or_none,
        test_step_handles.test_forwards_alone,
        test_step_handles.test_all_ranks_stop_alike,
        test_step_handles.test_handles_tell_what_steps_would_have_raised,
    ],
    ids=lambda test: test.__name__,
)
def test_as_on_the_cpu(sim_pool: SimPool, test: Callable[[SimPool], None]) -> None:
    test(sim_pool)


@contextmanager
def no_syncs(reads: int = 0) -> Iterator[None]:
    """Inside, the host must not wait for the device, not even at a step's end; `reads`: of earlier steps, at most."""
    device = current_device()
    device.syncs.clear()
    yield
    of_earlier = [sync for sync in device.syncs if sync.operation == READ]
    assert len(of_earlier) <= reads, of_earlier
    assert len(device.syncs) == len(of_earlier), [*device.syncs]


def trained(rank: int, form: str, waits: bool, scaled: bool) -> tuple[list[float], dict[str, float], list[list[float]]]:
    """Five steps of Adam with clipping, under autocast and with a scaler where `scaled`, whose third step overflows."""
    with (
        SimDevice(f"rank {rank}").checked(),
        Pipeline(stages_for(form).to("sim"), plan_for(2), FORMS[form]) as pipeline,
    ):
        batches = [tuple(tensor.to("sim") for tensor in batch_of(N, seed)) for seed in range(5)]
        optimizer = torch.optim.Adam([*pipeline.parameters()], lr=0.1)
        scaler = torch.amp.GradScaler("sim", init_scale=4.0, growth_interval=1) if scaled else None
        step, norms = [0], []
        if rank == 1 and scaled:
            weight = next(pipeline.parameters())
            weight.register_hook(lambda g: torch.full_like(g, torch.inf) if step[0] == 2 else g)
        losses: list[Any] = []
        for step[0], batch in enumerate(batches):
            options = {"scale": 0.5, "sync": step[0] != 3} if step[0] in (3, 4) else {}
            if step[0] == 0 or waits:
                losses.append(pipeline.step(*batch, scaler=scaler, **options))
            else:
                with no_syncs(reads=step[0] > 2):  # at most two steps are running when another one begins
                    losses.append(pipeline.begin_step(*batch, scaler=scaler, **options))
            if options.get("sync", True):
                if scaler is not None:
                    scaler.unscale_(optimizer)
                with no_syncs():
                    norms.append(pipeline.clip_grad_norm_(0.5))
                scaler.step(optimizer) if scaler is not None else optimizer.step()  # a scaler's step waits, as in torch
                if scaler is not None:
                    scaler.update()
                optimizer.zero_grad()
        losses = [loss if isinstance(loss, float) else loss.wait() for loss in losses]
        weights = [parameter.detach().flatten().tolist() for parameter in pipeline.parameters()]
        scale = [0.0 if scaler is None else scaler.get_scale()]
        return losses, dict(pipeline.metrics), [*weights, [norm.item() for norm in norms], scale]


@pytest.mark.dist
@pytest.mark.parametrize(("form", "scaled"), [("a mean, added losses", False), ("metrics", True)])
def test_nothing_waits_for_the_device(pool: Pool, form: str, scaled: bool) -> None:
    waiting, other = (pool.run(2, trained, form, waits, scaled) for waits in (True, False))
    assert repr(waiting) == repr(other)
    assert all(math.isfinite(loss) for losses, *_ in other for loss in losses)
    assert ("error of seen" in other[0][1]) is (form == "metrics")
    for *_, (*_, norms, (scale,)) in other:
        assert math.isfinite(norms[2]) is not scaled
        assert scale == (4.0 * 2 * 2 / 2 * 2 if scaled else 0.0)


def scales_differ(rank: int, waits: bool) -> list[str]:
    found = []
    with SimDevice(f"rank {rank}").checked(), Pipeline(chain(2).to("sim"), plan_for(2), loss_fn) as pipeline:
        batch = [tensor.to("sim") for tensor in batch_of(N)]
        pipeline.step(*batch)
        scaler = torch.amp.GradScaler("sim", init_scale=4.0 * (1 + rank))
        step = pipeline.begin_step(*batch, scaler=scaler) if not waits else None
        found.append(refusal(step.wait if step is not None else lambda: pipeline.step(*batch, scaler=scaler)))
        scaler.update()
        found.append(refusal(pipeline.step, *batch, scaler=scaler if rank else None))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("waits", [True, False])
def test_scales_that_differ_are_found_at_the_end(pool: Pool, waits: bool) -> None:
    for differ, none in pool.run(2, scales_differ, waits):
        assert "gradient scalers differ (scales 4 and 8)" in differ
        assert differ.endswith("Do not apply the gradients of this step") is waits
        assert (APPLIED in differ) is not waits
        assert "gradient scalers differ (one on some ranks, none on others)" in none


def refused(rank: int, name: str) -> str:
    """Nobody asks a handle, and the device is so far behind that its refusal comes when the pipeline is closed."""
    how, loss = losses_by_name()
    with SimDevice(f"rank {rank}").checked():
        pipeline = Pipeline(chain(2).to("sim"), plan_for(2), loss)
        batch, bad = ([tensor.to("sim") for tensor in of] for of in (batch_of(N), batch_with(m1=math.nan)))
        pipeline.step(*batch)
        how["form"] = "counted" if name == "nan" else name
        pipeline.begin_step(*(bad if name == "nan" else batch))
        how["form"] = "counted"
        for _ in range(3):
            pipeline.begin_step(*batch)
        return refusal(pipeline.close)


@pytest.mark.dist
def test_what_nobody_waits_for_is_raised_on_all_ranks(pool: Pool) -> None:
    texts = {
        "nan": "step 2: the mean loss is nan (",
        "zero": "loss_fn returned (sum, count) with a count of 0",
        "mean": "loss_fn returns a mean, after (sum, count) in earlier steps",
        "new metric": "loss_fn returns a metric in begin_step that it has not returned before",
        "negative": "loss_fn returned a count that is negative or not finite, 4 times in all micro-batches",
    }
    for name, text in texts.items():
        for told in pool.run(2, refused, name):
            assert text in told, name
            assert APPLIED in told


class NoCount(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rota.add_loss(x.mean(), torch.ones((), device=x.device) * -1)
        return x


def test_counts_of_added_losses_stay_on_the_device(device: SimDevice) -> None:
    x = torch.ones(2, device="sim")
    with no_syncs(), rota.collect_losses() as added:
        NoCount()(x)
        total = added.weighted_total
    assert total.item() == -1
    assert device.syncs
    with pytest.raises(PipelineError, match=r"got as count torch.float32 of shape \[2\]"):
        rota.add_loss(torch.ones(()), torch.ones(2))


def norms_of(rank: int, where: str) -> list[tuple[float, list[Tensor | None]]]:
    """For each norm type the norm, and the clipped gradients."""
    found = []
    plan = plan_for(3, "gpipe")
    with SimDevice(f"rank {rank}").checked(), Pipeline(test_norms.stages_of().to(where), plan, loss_fn) as pipeline:
        for norm_type in test_norms.NORM_TYPES:
            clear(pipeline)
            pipeline.step(*(tensor.to(where) for tensor in batch_of(N)))
            with no_syncs():
                norm = pipeline.clip_grad_norm_(0.25, norm_type)
            assert (norm.dtype, norm.shape, norm.device.type) == (torch.float64, (), where)
            found.append((norm.item(), [p.grad.cpu() if p.grad is not None else None for p in pipeline.parameters()]))
    return found


@pytest.mark.dist
def test_norms_of_any_type(pool: Pool) -> None:
    """Rank 1 has no gradients, and a tied one counts once. The CPU's are compared with torch's in test_norms."""
    on_sim, on_cpu = (pool.run(3, norms_of, where) for where in ("sim", "cpu"))
    torch.testing.assert_close(on_sim, on_cpu, rtol=1e-10, atol=1e-10)


def test_the_accelerators_autocast_is_seen() -> None:
    assert ambient_autocast() == ()
    with torch.autocast("sim", torch.bfloat16):
        found = ambient_autocast()
        assert found == (("sim", torch.bfloat16),)
        with without_autocast(found):
            assert ambient_autocast() == ()
        with torch.autocast("cpu", torch.bfloat16):
            assert ambient_autocast() == (("cpu", torch.bfloat16), ("sim", torch.bfloat16))
