"""What `loss_fn` may return: a mean, (sum, count), a dict with metrics; the same numbers on every rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rota
from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, bidirectional, place
from rota.runtime.device.protocol import HostDevice
from rota.runtime.losses import loss_of, needs_target
from rota.schedules import NAMED, chimera
from support.loss_cases import Batch, Case, assert_exact
from support.meshed import part_of
from support.networks import WIDTH, Stage, chain, clear, loss_fn, plan_for, refusal, rows_of
from support.pool import Pool, on_ranks

N = 4
CHAINS = chimera(bidirectional(Costs.uniform(2), Cluster.uniform(2)), N)


LOSS = torch.tensor(3.0)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (2.0, "loss_fn returned float; it must return a tensor with one element, the mean loss"),
        (None, "loss_fn returned NoneType"),
        ([LOSS], "loss_fn returned list"),
        (torch.zeros(3), r"loss_fn returned shape \[3\]"),
        ((LOSS, LOSS, LOSS), "loss_fn returned a tuple of 3"),
        ((LOSS, torch.zeros(2)), r"the count that loss_fn returned is a tensor of shape \[2\]"),
        ((LOSS, -1), "loss_fn returned the count -1"),
        ((LOSS, float("nan")), "loss_fn returned the count nan"),
        ({"accuracy": 1.0}, r"loss_fn returned a dict with \['accuracy'\]; add 'loss' to it"),
        ({"loss": LOSS, "logits": torch.zeros(2, 2)}, r"the metric 'logits' .* a tensor of shape \[2, 2\]; give a num"),
        (torch.tensor(1j), "complex"),
    ],
)
def test_other_forms_are_refused(returned: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        loss_of(lambda *_: returned, None, None, HostDevice())


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        (lambda output: output, False),
        (lambda output, *, scale=1.0: output * scale, False),
        (lambda output, target: output, True),
        (lambda output, target=None: output, True),
        (lambda *values: values[0], True),
        (nn.MSELoss(), True),
        (torch.nn.functional.mse_loss, True),
        (max, True),
    ],
)
def test_a_loss_of_the_output_alone_needs_no_target(loss_fn: Any, expected: bool) -> None:
    assert needs_target(loss_fn) is expected


@on_ranks(2)
def test_a_loss_of_the_output_alone(rank: int) -> None:
    torch.manual_seed(0)
    stages = chain(2)
    x, target = rows_of(2 * N)
    with Pipeline(stages, plan_for(2), lambda output: output.square().mean()) as pipeline:
        loss = pipeline.step(x)
        assert not pipeline.reads_targets
        with pytest.raises(PipelineError, match="loss_fn takes the output alone"):
            pipeline.step(x, target)
        assert pipeline.evaluate(x) == pytest.approx(loss, rel=1e-12)
        whole = stages.run(x).square().mean()
        assert loss == pytest.approx(whole.item(), rel=1e-12)
        ours = {name: parameter.grad.clone() for name, parameter in pipeline.named_parameters()}
        clear(pipeline)
        whole.backward()
        for name, parameter in pipeline.named_parameters():
            assert torch.allclose(ours[name], parameter.grad, rtol=1e-10, atol=1e-12)


def with_metrics(output: Tensor, target: Tensor) -> dict[str, Any]:
    wrong = (output - target).abs()
    seen = target[:, 0] > 0
    return {
        "loss": ((output - target) ** 2).mean(),
        "error": wrong.mean(),  # a mean over rows
        "error of seen": ((wrong.mean(1) * seen).sum(), seen.sum()),
        "rows": float(len(target)),
    }


def metrics_of(rank: int, plan: Plan, dp: int) -> list[Any]:
    results: list[Any] = []
    with Pipeline(chain(2), plan, with_metrics, mesh=rota.mesh(pp=2, dp=dp)) as pipeline:
        assert pipeline.metrics == {}
        for seed in (1, 2):
            results.append((pipeline.step(*part_of(rows_of(20, seed), pipeline)), pipeline.metrics))
        pipeline.forward(part_of(rows_of(20), pipeline)[0])
        assert pipeline.metrics == results[-1][1]  # as of the last step
        results.append((pipeline.evaluate(*part_of(rows_of(20, 1), pipeline)), pipeline.metrics))
    return results


@pytest.mark.parametrize("dp", [1, 2])
def test_metrics_are_the_whole_batch_s_on_every_rank(pool: Pool, dp: int) -> None:
    """Replicas have two streams each."""
    plan = plan_for(2, num_microbatches=3) if dp == 1 else CHAINS
    by_rank = pool.run(2 * dp, metrics_of, plan, dp)
    rows = 20 / dp / plan.num_microbatches
    for results in by_rank:
        for (loss, metrics), seed in zip(results, (1, 2, 1), strict=True):
            x, target = rows_of(20, seed)
            serial = with_metrics(chain(2).run(x), target)
            assert loss == pytest.approx(serial["loss"].item(), rel=1e-10)
            total, count = serial["error of seen"]
            assert metrics["error"] == pytest.approx(serial["error"].item(), rel=1e-10)
            assert metrics["error of seen"] == pytest.approx((total / count).item(), rel=1e-10)
            assert metrics["rows"] == pytest.approx(rows, rel=0.05)  # 7, 7 and 6 of them, weighed by themselves


def changing_metrics(rank: int) -> list[Any]:
    calls: list[Any] = []

    def loss(output: Tensor, target: Tensor) -> dict[str, Any]:
        calls.append(1)
        return {"loss": loss_fn(output, target)} | ({"late": 2.0} if len(calls) > N else {}) | {"first": 1.0}

    with Pipeline(chain(2), plan_for(2), loss) as pipeline:
        metrics = []
        for _ in range(3):
            pipeline.step(*rows_of(8))
            metrics.append(pipeline.metrics)
    return metrics


def test_metrics_may_come_later(pool: Pool) -> None:
    for metrics in pool.run(2, changing_metrics):
        assert metrics == [{"first": 1.0}, {"first": 1.0, "late": 2.0}, {"first": 1.0, "late": 2.0}]


def refusals(rank: int) -> list[Any]:
    messages: list[Any] = []
    how = {"form": "zero"}

    def loss(output: Tensor, target: Tensor) -> Any:
        total, count = ((output - target) ** 2).sum(), target.numel()
        if how["form"] == "mixed":
            how["form"] = "mean"
            return total, count
        return {"zero": (total * 0, 0), "mean": total / count, "counted": (total, count)}[how["form"]]

    def steps(form: str, **options: Any) -> str:
        how["form"] = form
        return refusal(pipeline.step, *rows_of(8), **options)

    with Pipeline(chain(2), plan_for(2), loss) as pipeline:
        for parameter in pipeline.parameters():
            parameter.grad = torch.ones_like(parameter)
        messages += [steps("zero"), steps("mixed")]
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in pipeline.parameters())  # as before these steps
        how["form"] = "counted"
        pipeline.step(*rows_of(8), sync=False)
        messages.append(refusal(pipeline.clip_grad_norm_, 1.0))
        if rank:
            with torch.no_grad():
                next(pipeline.parameters()).add_(1)  # as an optimizer does
        messages.append(steps("counted"))
        clear(pipeline)
        how["form"] = "counted"
        pipeline.step(*rows_of(8), sync=False)
        if rank:
            clear(pipeline)
        messages.append(steps("counted"))
        messages.append(steps("mean"))
    return messages


def test_refused_on_all_ranks(pool: Pool) -> None:
    by_rank = pool.run(2, refusals)
    assert by_rank[0] == by_rank[1]
    zero, mixed, clipped, stepped, cleared, other = by_rank[0]
    assert "with a count of 0 for every micro-batch" in zero
    assert "returns a mean for some micro-batches and (sum, count) for others" in mixed
    assert "clip_grad_norm_ is called after a step with sync=False" in clipped
    assert "weights have changed after a step with sync=False" in stepped
    assert "after a step with sync=False only some gradients were cleared, but the loss" in cleared
    assert "loss_fn returns a mean, after (sum, count) in earlier steps" in other


def counted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.numel()


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_clearing_gradients_ends_a_round(rank: int, set_to_none: bool) -> None:
    """A round that is given up, as at the end of an epoch."""
    with Pipeline(chain(2), plan_for(2), counted_loss) as pipeline:
        optimizer = torch.optim.SGD([*pipeline.parameters()])
        pipeline.step(*rows_of(8, 2))
        pipeline.step(*rows_of(24, 3), sync=False)
        optimizer.zero_grad(set_to_none=set_to_none)
        pipeline.step(*rows_of(8))
        gradients = [p.grad for p in pipeline.parameters()]
    stages = chain(2)
    x, target = rows_of(8)
    ((stages.run(x) - target) ** 2).mean().backward()
    torch.testing.assert_close(gradients, [p.grad for p in stages[rank].parameters()], rtol=1e-10, atol=1e-10)


def scaled_steps(rank: int) -> list[float]:
    """Sums over many elements would overflow float16 at once, were they not divided on the way."""
    torch.manual_seed(0)
    stages = rota.Stages([nn.Linear(WIDTH, WIDTH).half() for _ in range(2)])

    def loss(output: Tensor, target: Tensor) -> Any:
        return counted_loss(output.float(), target)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    with Pipeline(stages, plan_for(2), loss) as pipeline:
        x, target = (tensor.half() for tensor in rows_of(1024))
        optimizer = torch.optim.SGD([*pipeline.parameters()], lr=0.05)
        losses = []
        for _ in range(4):
            losses.append(pipeline.step(x, target, scaler=scaler))
            for parameter in pipeline.parameters():
                parameter.grad.div_(scaler.get_scale())
                assert parameter.grad.isfinite().all()
            optimizer.step()
            optimizer.zero_grad()
            scaler.update()
        assert scaler.get_scale() == 2.0**12  # no overflow, from the first step on
    return losses


def test_low_precision_does_not_overflow(pool: Pool) -> None:
    first, second = pool.run(2, scaled_steps)
    assert first == second
    assert sorted(first, reverse=True) == first


# --- `rota.add_loss` in stages: counted once per micro-batch, weighed as the main loss is, on any plan ----------------


class Expert(nn.Module):
    """Adds two losses. `weighed`: with the number of rows as their count."""

    def __init__(self, weighed: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 1).double()
        self.weighed, self.checkpointed = weighed, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        gates = torch.sigmoid(self.gate(x))
        count = len(x) if self.weighed else None
        rota.add_loss(0.1 * gates.square().mean(), count)
        x = torch.tanh(self.linear(x)) * gates
        rota.add_loss(0.2 * x.abs().mean().reshape(1), count)
        return x


def expert_stages(num_stages: int, **options: Any) -> Stages:
    torch.manual_seed(0)
    return Stages([Expert(**options) for _ in range(num_stages)])


def summed_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return ((output - target) ** 2).mean(1).sum(), len(output)


def twice(rows: int) -> list[list[Batch]]:
    """A round of two steps with the same batch."""
    return [[rows_of(rows)] * 2]


def test_added_losses(pool: Pool) -> None:
    stages, counted = expert_stages(2), expert_stages(2, weighed=True)
    several_ranks = NAMED["gpipe"](place(Costs.uniform(2), Cluster.uniform(2), [(0, 1), 1]), N)
    assert_exact(
        pool,
        {
            "1f1b": Case(stages, plan_for(2), twice(16)),
            "fewer rows than micro-batches": Case(stages, plan_for(2), twice(3)),
            "I and W": Case(stages, plan_for(2, "zb_h1", weight_us=1), twice(14)),
            "bidirectional": Case(stages, CHAINS, twice(14)),
            "a stage on two ranks": Case(stages, several_ranks, twice(16)),
            "recomputed": Case(stages, plan_for(2), twice(16), recompute="full"),
            "checkpointed": Case(expert_stages(2, checkpointed=True), plan_for(2, "zb_h1", weight_us=1), twice(16)),
            "counted": Case(counted, plan_for(2), twice(14), summed_loss),
            "counted, fewer rows": Case(counted, plan_for(2), twice(3), summed_loss),
            "counted, bidirectional": Case(counted, CHAINS, twice(14), summed_loss),
        },
    )


def test_added_losses_of_replicas(pool: Pool) -> None:
    assert_exact(
        pool,
        {
            "means": Case(expert_stages(2), plan_for(2), twice(28), dp=2),
            "counted": Case(expert_stages(2, weighed=True), plan_for(2), twice(29), summed_loss, dp=2),
        },
    )


def added_alone(linear: nn.Linear, x: Tensor) -> Tensor:
    """Nothing but the added loss reaches its weights, and what it returns has no gradient."""
    rota.add_loss(linear(x).square().mean())
    return x.detach()


def test_a_stage_may_be_trained_by_its_added_loss_alone(pool: Pool) -> None:
    stages = expert_stages(3)
    stages = Stages([stages[0], Stage(added_alone, 1), stages[2]])
    assert_exact(pool, {"detached": Case(stages, plan_for(3), twice(16))})


def mixed(rank: int) -> list[str]:
    messages = []
    for weighed, loss in ((True, loss_fn), (False, summed_loss)):
        with Pipeline(expert_stages(2, weighed=weighed), plan_for(2), loss) as pipeline:
            messages.append(refusal(pipeline.step, *twice(8)[0][0]))
    return messages


def test_counts_must_fit_the_loss(pool: Pool) -> None:
    for with_count, without in pool.run(2, mixed):
        assert "rota.add_loss was given a count, but loss_fn returns a mean; leave the count out" in with_count
        assert "rota.add_loss was given no count, but loss_fn returns (sum, count)" in without
