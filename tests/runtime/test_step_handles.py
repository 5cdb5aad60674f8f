"""Steps of `begin_step`: the values of steps that wait, and nothing that is refused gets lost."""

import math
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rota
from rota import Pipeline, StepHandle
from rota.runtime.execution import forwards_of
from runtime.test_nonfinite_loss import batch_with
from support.networks import batch_of, chain, clear, loss_fn, plan_for, refusal, stages_of
from support.pool import Pool, on_ranks

N = 4
APPLIED = "After begin_step the gradients of this step may have been applied already"


def adds_loss(counted: bool, linear: nn.Linear, x: Tensor) -> Tensor:
    """With a count that is a tensor where `counted`."""
    rota.add_loss(0.1 * x.square().mean(), (x[:, 0] > -9).sum() if counted else None)
    return torch.tanh(linear(x)) + x


def counted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    seen = target[:, 0] > -1
    return ((output - target).square().mean(1) * seen).sum(), seen.sum()


def loss_with_metrics(output: Tensor, target: Tensor) -> dict[str, Any]:
    seen = target[:, 0] > 0
    error = (output - target).abs()
    metrics = {"error": error.mean(), "error of seen": ((error.mean(1) * seen).sum(), seen.sum()), "rows": len(target)}
    return {"loss": counted_loss(output, target)} | metrics


FORMS: dict[str, Callable[..., Any]] = {
    "a mean": loss_fn,
    "a mean, added losses": loss_fn,
    "(sum, count)": counted_loss,
    "(sum, count), added losses": counted_loss,
    "metrics": loss_with_metrics,
}


def stages_for(form: str) -> rota.Stages:
    return stages_of(*[partial(adds_loss, "count" in form)] * 2) if "added" in form else chain(2)


def trained(rank: int, form: str, waits: bool) -> tuple[list[float], dict[str, float], list[Tensor]]:
    """Six steps, of which two accumulate; a handle is waited for once the next step was begun."""
    with Pipeline(stages_for(form), plan_for(2), FORMS[form]) as pipeline:
        optimizer = torch.optim.SGD([*pipeline.parameters()], lr=0.1)
        losses: list[float] = []
        handles: list[StepHandle] = []
        for seed in range(6):
            options: dict[str, Any] = {"scale": 0.5, "sync": seed != 2} if seed in (2, 3) else {}
            step = (pipeline.step if waits else pipeline.begin_step)(*batch_of(N, seed), **options)
            if waits:
                losses.append(step)
            else:
                handles.append(step)
                losses += [handle.wait() for handle in handles[-2:-1]]
            if options.get("sync", True):
                pipeline.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        losses += [handle.wait() for handle in handles[-1:]]
        assert all(handle.is_done for handle in handles)
        assert [handle.wait() for handle in handles] == (losses if handles else [])
        return losses, pipeline.metrics, [parameter.detach().clone() for parameter in pipeline.parameters()]


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_steps_that_wait(pool: Pool, form: str) -> None:
    for waiting, other in zip(pool.run(2, trained, form, True), pool.run(2, trained, form, False), strict=True):
        assert waiting[0] == other[0]
        assert waiting[1] == other[1]
        assert ("error of seen" in other[1]) is (form == "metrics")
        assert all(torch.equal(a, b) for a, b in zip(waiting[2], other[2], strict=True))


def forwards(rank: int, has_loss: bool) -> tuple[list[float], list[float]]:
    """Steps of a plan without backwards."""
    with Pipeline(chain(2), forwards_of(plan_for(2)), loss_fn if has_loss else None) as pipeline:
        batches = [(x, target if has_loss else None) for x, target in (batch_of(N, seed) for seed in range(3))]
        handles = [pipeline.begin_step(*batch) for batch in batches]
        return [handle.wait() for handle in handles], [pipeline.step(*batch) for batch in batches]


def test_forwards_alone(pool: Pool) -> None:
    for losses, expected in pool.run(2, forwards, True):
        assert losses == expected
        assert all(map(math.isfinite, losses))
    for losses, expected in pool.run(2, forwards, False):
        assert all(map(math.isnan, losses + expected))


def losses_by_name() -> tuple[dict[str, str], Callable[..., Any]]:
    """A loss function that does what the dict says under "form"."""
    how = {"form": "counted"}

    def loss(output: Tensor, target: Tensor) -> Any:
        total, count = (output - target).square().sum(), torch.ones_like(target).sum()
        forms: dict[str, Callable[[], Any]] = {
            "counted": lambda: (total, count),
            "zero": lambda: (total * 0, count * 0),
            "mean": lambda: total / target.numel(),
            "new metric": lambda: {"loss": (total, count), "new": total.detach()},
            "negative": lambda: (total, -count),
        }
        return forms[how["form"]]()

    return how, loss


def waited_for(rank: int, names: list[str]) -> list[str]:
    """What handles tell, each twice; and a step that goes on."""
    how, loss = losses_by_name()
    messages = []
    with Pipeline(chain(2), plan_for(2), loss) as pipeline:
        pipeline.step(*batch_of(N))
        for name in names:
            how["form"] = name if name != "nan" else "counted"
            handle = pipeline.begin_step(*(batch_with(m1=math.nan) if name == "nan" else batch_of(N)))
            messages.append(refusal(handle.wait))
            assert refusal(handle.wait) == messages[-1]
            assert handle.is_done
            clear(pipeline)
        how["form"] = "counted"
        assert math.isfinite(pipeline.begin_step(*batch_of(N)).wait())
        assert all(bool(p.grad.isfinite().all()) for p in pipeline.parameters() if p.grad is not None)
    return messages


def test_handles_tell_what_steps_would_have_raised(pool: Pool) -> None:
    by_rank = pool.run(2, waited_for, ["nan", "zero", "mean"])
    for messages in by_rank:
        assert all(APPLIED in text for text in messages)
        nan, zero, mean = messages
        assert nan.startswith("step 2: the mean loss is nan (")
        assert "with a count of 0 for every micro-batch" in zero
        assert "loss_fn returns a mean, after (sum, count) in earlier steps" in mean
    assert "nan for micro-batch 1 at stage 1 on rank 1" in by_rank[1][0]
    assert "the ranks of the last stage say for which micro-batches" in by_rank[0][0]


@pytest.mark.parametrize("then", ["close", "step", "waiting step", "evaluate"])
@on_ranks(2)
def test_what_nobody_waits_for_is_raised_all_the_same(rank: int, then: str) -> None:
    """A step is refused, and nobody asks its handle."""

    def run() -> None:
        with Pipeline(chain(2), plan_for(2), loss_fn) as pipeline:
            pipeline.step(*batch_of(N))
            pipeline.begin_step(*batch_with(m1=math.nan))
            if then != "close":
                calls = {"step": pipeline.begin_step, "waiting step": pipeline.step, "evaluate": pipeline.evaluate}
                calls[then](*batch_of(N))

    message = refusal(run)
    assert message.startswith("step 2: the mean loss is nan")
    assert APPLIED in message


def only_one_waits(rank: int) -> str:
    with Pipeline(chain(2), plan_for(2), loss_fn) as pipeline:
        return refusal(pipeline.step if rank == 0 else pipeline.begin_step, *batch_of(N))


def test_all_ranks_wait_or_none(pool: Pool) -> None:
    for message in pool.run(2, only_one_waits):
        assert "rank 0 calls step(); rank 1 calls begin_step()" in message


def asked_to_stop(rank: int) -> list[bool]:
    """Rank 1 is asked during step 2; rank 0 alone waits for the handles."""
    answers = []
    with Pipeline(chain(2), plan_for(2), loss_fn) as pipeline:
        for step in range(5):
            if rank == 1 and step == 2:
                pipeline._engine.stops._asked = signal.SIGTERM
            handle = pipeline.begin_step(*batch_of(N))
            if rank == 0:
                handle.wait()
            answers.append(pipeline.should_stop)
        pipeline.evaluate(*batch_of(N))
        answers.append(pipeline.should_stop)
        pipeline._engine.stops._asked = None
    return answers


def test_all_ranks_stop_alike(pool: Pool) -> None:
    first, second = pool.run(2, asked_to_stop)
    assert first == second
    assert first[:2] == [False, False]
    assert first[-1]
