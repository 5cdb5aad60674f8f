"""Updates between steps: by an optimizer of other weights, on some ranks only, within a step, clipped rank by rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

from rota import Cluster, Costs, Pipeline, PipelineError, Stages, place
from rota.runtime.updates import Report, Updates
from rota.schedules import gpipe
from support.networks import WIDTH, batch_of, loss_fn
from support.pool import Pool, on_ranks

PLAN = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 2)
BATCH = batch_of(4)


def made() -> tuple[nn.Module, Updates]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()
    return model, Updates(model.named_parameters())


def step(model: nn.Module, updates: Updates) -> None:
    with updates:
        backward(model)
    updates.watch_gradients()


def backward(model: nn.Module) -> None:
    model(torch.ones(3, WIDTH, dtype=torch.float64)).square().sum().backward()


@pytest.mark.parametrize(
    ("change", "is_reported"),
    [
        (lambda _: None, False),
        (lambda parameters: clip_grad_norm_(parameters, 1e9), True),
        (lambda parameters: SGD(parameters, lr=0.1).zero_grad(), False),
    ],
)
def test_gradients_that_change_before_the_first_update_are_reported(
    change: Callable[[list[nn.Parameter]], object], is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, updates = made()
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        step(model, updates)
        change([*model.parameters()])
        optimizer.step()
        updates.report()
    assert len([text for text in caplog.messages if "use pipeline.clip_grad_norm_" in text]) == is_reported
    updates.close()


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)


class WithData(Optimizer):
    """As older ones of Muon and LAMB."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.1)


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].bias.clamp_(-1, 1)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("was_updated", [False, True])
@pytest.mark.parametrize(
    ("update", "has_changed", "is_updated"),
    [
        (lambda model: SGD(model.parameters(), lr=0.1).step(), True, True),
        (lambda model: Adam(model.parameters(), lr=0.1, fused=True).step(), True, True),
        (lambda model: WithData(model.parameters()).step(), True, True),
        (in_place, True, True),
        (load, True, True),
        (clamp, True, False),
        (lambda model: model.eval(), False, False),
        (lambda model: SGD([torch.ones(1, requires_grad=True)], lr=0.1).step(), False, False),
    ],
)
def test_updates_seen(update: Callable[[Any], object], has_changed: bool, is_updated: bool, was_updated: bool) -> None:
    model, updates = made()
    assert updates.report() == Report()
    step(model, updates)
    if was_updated:
        SGD(model.parameters(), lr=0.1).step()
        assert updates.report().is_updated
        step(model, updates)
    update(model)
    for _ in range(2):  # a step that is refused, and tried again
        report = updates.report()
        assert (report.has_changed, report.is_updated, report.is_idle) == (has_changed, is_updated, not has_changed)
    updates.close()


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_an_optimizer_of_another_copy_is_told(kind: Callable[..., Optimizer]) -> None:
    (model, updates), (other, _) = made(), made()
    optimizer = kind(other.parameters(), lr=0.01)
    step(model, updates)
    optimizer.step()
    assert updates.report() == Report(is_idle=True, stranger=kind.__name__)
    updates.close()


@pytest.mark.parametrize("how", ["own too", "by hand", "other trained"])
def test_another_optimizer_beside_the_pipelines_own_is_right(how: str) -> None:
    (model, updates), (other, _) = made(), made()
    optimizer, another = SGD(model.parameters(), lr=0.01), SGD(other.parameters(), lr=0.01)
    step(model, updates)
    if how == "other trained":
        backward(other)
    another.step()
    if how == "own too":
        optimizer.step()
    elif how == "by hand":
        in_place(model)
    assert not updates.report().stranger
    updates.close()


def hooked(model: nn.Module, update: Callable[[nn.Parameter], object]) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def test_an_optimizer_that_steps_in_the_backward_is_refused_before_it_does() -> None:
    model, updates = made()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hooked(model, lambda parameter: Adam([parameter], lr=0.1, fused=True).step())
    with pytest.raises(PipelineError, match=r"Adam\.step\(\) was called while pipeline\.step ran"), updates:
        backward(model)
    assert all(map(torch.equal, before, model.parameters()))
    SGD(model.parameters(), lr=0.1).step()
    updates.close()


def test_weights_that_are_written_to_during_a_step_are_refused() -> None:
    model, updates = made()
    model[0].weight.requires_grad_(False)

    def update(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            model[0].weight.add_(1)  # as a codebook that a forward keeps
            model[2].bias.add_(1)

    hooked(model[2], update)
    with pytest.raises(PipelineError, match=r"^2\.bias was written to while pipeline\.step ran"), updates:
        backward(model)
    model[2].bias.requires_grad_(False)
    with updates:
        backward(model)
    updates.close()


Clip = Callable[[Pipeline], object]


def make_stages() -> Stages:
    torch.manual_seed(7)
    return Stages([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(2)])


def steps_of(clip: Clip, parameters: Callable[[Pipeline], Any], num_steps: int, **options: Any) -> tuple[int, str]:
    """How many steps were made, and why no more. `skipped`: a step after which this rank does not update."""
    skipped = options.pop("skipped", None)
    with Pipeline(make_stages(), PLAN, loss_fn) as pipeline:
        optimizer = Adam(parameters(pipeline), lr=0.01, **options)
        for step in range(num_steps):
            try:
                optimizer.zero_grad()
                pipeline.step(*BATCH)
            except PipelineError as error:
                return step, str(error)
            clip(pipeline)
            if step != skipped:
                optimizer.step()
    return num_steps, ""


def own(pipeline: Pipeline) -> Any:
    return pipeline.parameters()


def leave_alone(_: Pipeline) -> None:
    pass


@on_ranks(2)
def test_an_update_on_some_ranks_only_is_refused_on_all(rank: int) -> None:
    """Never on rank 1; not after step 2 on rank 0; and accumulated, frozen or skipped alike."""
    for fused in (False, True):
        parameters = own if rank == 0 else lambda _: [torch.ones(1, requires_grad=True)]
        last, told = steps_of(leave_alone, parameters, 4, fused=fused)
        assert last == 1
        assert told.startswith("Adam.step() was called on rank 1, but this optimizer has none")
        last, told = steps_of(leave_alone, own, 4, skipped=2 if rank == 0 else None, fused=fused)
        assert last == 3
        assert told.startswith("since the last step, the weights of rank 1 have been updated, but not those of rank 0")
        assert steps_of(leave_alone, own, 4, skipped=1, fused=fused) == (4, "")


def accumulate(rank: int) -> list[float]:
    """Rank 1 is frozen, then has gradients; between the steps of a round weights are clamped there, and evaluated."""
    stages = make_stages()
    stages[1].requires_grad_(False)
    losses = []
    with Pipeline(stages, PLAN, loss_fn) as pipeline:
        optimizer = Adam([*pipeline.parameters()], lr=0.01)
        for number in range(6):
            losses.append(pipeline.step(*BATCH, sync=number % 2 == 1))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            elif rank == 1:
                clamp(stages[1])
            losses.append(pipeline.evaluate(*BATCH))
            stages[1].requires_grad_(number > 1)
    return losses


@on_ranks(2)
def test_mistakes_of_a_loop_are_refused_on_all_ranks(rank: int) -> None:
    idle, refusal = steps_of(leave_alone, lambda _: make_stages()[rank].parameters(), 4)
    assert idle == 1
    assert refusal.startswith("Adam.step() was called on rank 0, but this optimizer has none of the weights of this ")
    assert steps_of(lambda p: p.clip_grad_norm_(1e-3), own, 4) == (4, "")
    assert steps_of(leave_alone, own, 4) == (4, "")


def test_rounds_frozen_ranks_and_evaluations_are_right(pool: Pool) -> None:
    losses = pool.run(2, accumulate)
    assert losses[0] == losses[1]
    assert len({*losses[0]}) > 3
