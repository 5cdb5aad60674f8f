"""verify in one process: exact models are, and each way not to be is named."""

import copy
import math
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import rota
from rota import CutPoint, PipelineError, Stages, split, verify
from support.layered_models import case
from support.odd_stages import Calls

WIDTH = 8


class Attending(nn.Module):
    """A layer that takes a mask; the model makes a sliding one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.q(x) @ x.transpose(1, 2) / math.sqrt(WIDTH)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return x + scores.softmax(-1) @ self.v(x)


def causal(length: int, window: int) -> Tensor:
    far = torch.arange(length)[:, None] - torch.arange(length)
    return (far >= 0) & (far < window)


class Sliding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attending() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = causal(x.shape[1], 2)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


class HandMade(nn.Module):
    """Some layers with a mask of its own, and maybe the head."""

    def __init__(self, layers: list[nn.Module], window: int, head: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.window, self.head = nn.ModuleList(layers), window, head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, causal(x.shape[1], self.window))
        return x if self.head is None else self.head(x)


def by_hand(model: nn.Module, *modules: nn.Module) -> Stages:
    stages = Stages(modules)
    stages.unsplit = model
    return stages


def sliding(window: int, copied: bool) -> tuple[Stages, Tensor, Tensor]:
    """Stages by hand; the second one's window is `window`, where the model has 2."""
    torch.manual_seed(0)
    model = Sliding()
    source = copy.deepcopy(model) if copied else model
    modules = HandMade([source.layers[0]], 2), HandMade([*source.layers[1:]], window, source.head)
    return by_hand(model, *modules), torch.randn(4, 6, WIDTH), torch.randn(4, 6, WIDTH)


def sequential(*layers: nn.Module) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 4))
    return model, torch.randn(8, WIDTH)


@pytest.mark.parametrize("name", ["gpt", "two branches"])
def test_a_split_model_is_exact(name: str) -> None:
    model, batch, target, loss_fn = case(name)
    stages, _ = rota.models.finest(model, batch[:1]) if name == "gpt" else (split(model, 4, example=batch[:1]), ())
    result = verify(stages, batch[:4], target[:4], loss_fn, num_microbatches=4)
    assert result.exact, result.to_text()
    assert [comparison.dtype for comparison in result.comparisons] == ["float64", "float32"]
    assert result.comparisons[0].largest <= 1e-10
    compared = {parameter.name for parameter in result.comparisons[0].parameters}
    assert compared == {name for name, _ in model.named_parameters()}
    assert result.to_text().startswith("exact\n")


@pytest.mark.parametrize("copied", [False, True])
def test_stages_by_hand_match_by_identity_or_by_values(copied: bool) -> None:
    stages, x, target = sliding(2, copied)
    assert verify(stages, x, target, functional.mse_loss).exact


@pytest.mark.parametrize("copied", [False, True])
def test_another_mask_is_named_with_its_layer_and_stage(copied: bool) -> None:
    stages, x, target = sliding(6, copied)
    result = verify(stages, x, target, functional.mse_loss)
    assert not result.exact
    assert result.by_microbatches is False
    assert result.reasons == (
        "'layers.1' of stage 1 gets a different 'mask' than in the unsplit model: different values",
    ), result.to_text()
    assert {difference.stage for difference in result.comparisons[0].worst} == {0, 1}


def test_the_batch_norm_is_named_and_by_microbatches_it_is_exact() -> None:
    model, x = sequential(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh()))
    target = torch.randn(8, 4)
    result = verify(split(model, 2), x, target, functional.mse_loss)
    assert not result.exact
    assert result.by_microbatches
    assert len(result.reasons) == 1
    assert result.reasons[0].startswith("BatchNorm1d '1.0' takes its statistics over the rows of a micro-batch")
    assert verify(split(model, 2), x, target, functional.mse_loss, against="microbatches").exact


class Classifier(nn.Module):
    """Norms after a stem that mixes rows: sums of what norms return are the same, whatever the batch."""

    def __init__(self, *stem: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Sequential(*stem), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.cut = CutPoint()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.cut(self.stem(images).flatten(2).mean(-1))))


def stem(*, in_place: bool) -> list[nn.Module]:
    return [nn.Conv2d(3, WIDTH, 3), nn.BatchNorm2d(WIDTH), nn.ReLU(in_place), nn.Conv2d(WIDTH, WIDTH, 3)]


@pytest.mark.parametrize(("num_norms", "in_place", "fp64"), [(1, True, False), (2, False, True)])
def test_what_comes_after_a_batch_norm_is_not_named(num_norms: int, in_place: bool, fp64: bool) -> None:
    torch.manual_seed(0)
    after = [nn.BatchNorm2d(WIDTH), nn.ReLU(in_place)] if num_norms == 2 else []
    model = Classifier(*stem(in_place=in_place), *after)
    x, target = 10 * torch.randn(16, 3, 8, 8), torch.randint(4, (16,))
    result = verify(split(model, 2, example=x), x, target, functional.cross_entropy, num_microbatches=4, fp64=fp64)
    (reason,) = result.reasons
    assert reason.startswith("BatchNorm2d 'stem.1' takes its statistics over the rows of a micro-batch")
    assert "GroupNorm or LayerNorm" in reason
    assert "`rota verify --against microbatches`" in reason


class Normed(nn.Module):
    """Gives its layer what a norm returns, of which sums and squares are the same for any input."""

    def __init__(self, layer: nn.Module, with_relu: bool = False) -> None:
        super().__init__()
        self.layer, self.with_relu = layer, with_relu

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(functional.layer_norm(x.relu() if self.with_relu else x, [WIDTH]))


def test_a_different_input_after_a_norm_is_named() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH), 1e3 * torch.randn(8, WIDTH)
    model = nn.Sequential(nn.Identity(), Normed(layer))
    stages = by_hand(model, nn.Identity(), Normed(layer, with_relu=True))
    result = verify(stages, x, x, functional.mse_loss)
    assert result.reasons == (
        "'1.layer' of stage 1 gets a different 'input' than in the unsplit model: different values",
    ), result.to_text()


def uneven_tokens() -> tuple[Stages, Tensor, Tensor]:
    model, x = sequential()
    return split(model, 2), x, torch.tensor([0, 1, -100, -100, 2, 3, 0, -100])


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


def with_metrics(output: Tensor, target: Tensor) -> dict[str, Any]:
    right = (output.argmax(-1) == target).sum(), (target != -100).sum()
    return {"loss": summed(output, target), "accuracy": right, "size": output.square().mean()}


@pytest.mark.parametrize("fp64", [True, False])
def test_a_mean_over_uneven_tokens_is_named(fp64: bool) -> None:
    stages, x, target = uneven_tokens()
    result = verify(stages, x, target, functional.cross_entropy, fp64=fp64)
    assert not result.exact
    assert result.by_microbatches
    assert "have 2, 3 of them (targets that are not -100)" in result.reasons[0]
    assert result.reasons[0].endswith("Let loss_fn return (sum, count)")
    even = torch.tensor([0, 1, -100, -100, 2, 3, -100, -100])
    assert verify(stages, x, even, functional.cross_entropy, fp64=fp64).exact


@pytest.mark.parametrize("num_microbatches", [2, 3, 10])  # 3: of 3, 3 and 2 rows; 10: two are padding
def test_a_sum_with_its_count_is_exact_for_uneven_tokens(num_microbatches: int) -> None:
    stages, x, target = uneven_tokens()
    result = verify(stages, x, target, with_metrics, num_microbatches=num_microbatches)
    assert result.exact, result.to_text()
    expected = functional.cross_entropy(stages.run(x), target).item()  # over all tokens
    assert result.comparisons[1].split_loss == pytest.approx(expected)


class Gated(nn.Module):
    """A layer with a loss of its own: a mean over rows, or the square of one."""

    def __init__(self, with_count: bool, is_balance: bool = False) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.with_count, self.is_balance = with_count, is_balance

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid()
        value = gate.mean(0).square().sum() if self.is_balance else 0.1 * gate.square().mean()
        rota.add_loss(value, count=len(x) if self.with_count else None)
        return x + self.linear(x) * gate


@pytest.mark.parametrize("with_count", [False, True])
@pytest.mark.parametrize("num_microbatches", [2, 3, 10])
def test_losses_that_modules_add(with_count: bool, num_microbatches: int) -> None:
    checkpointed = Calls(lambda s, x: checkpoint(s.layer, x, use_reentrant=False), layer=Gated(with_count))
    model, x = sequential(Gated(with_count), checkpointed)
    target = torch.tensor([0, 1, -100, -100, 2, 3, 0, -100]) if with_count else torch.arange(8) % 4
    loss_fn: Any = with_metrics if with_count else functional.cross_entropy
    result = verify(split(model, 3), x, target, loss_fn, num_microbatches=num_microbatches)
    assert result.exact, result.to_text()
    with rota.collect_losses() as added:
        output = model(x)
        if with_count:
            total, count = summed(output, target)
            expected = (total + added.weighted_total) / count
        else:
            expected = functional.cross_entropy(output, target) + added.total
    assert result.comparisons[1].split_loss == pytest.approx(expected.item())


@pytest.mark.parametrize("with_count", [False, True])
def test_an_added_loss_that_mixes_rows_is_named(with_count: bool) -> None:
    model, x = sequential(Gated(with_count, is_balance=True))
    loss_fn: Any = summed if with_count else functional.cross_entropy
    arguments = (split(model, 2), x, torch.arange(8) % 4, loss_fn)
    result = verify(*arguments)
    assert len(result.reasons) == 1
    assert result.reasons[0].startswith("a loss that modules add by rota.add_loss is not a mean over rows")
    assert verify(*arguments, against="microbatches").exact


class Positions(nn.Module):
    """Takes keyword arguments, one of which has one row for all."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(10, WIDTH), nn.Embedding(6, WIDTH)
        self.cut, self.head = CutPoint(), nn.Linear(WIDTH, 10)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.cut(self.tokens(input_ids) + self.places(position_ids)).tanh())


def token_sum(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    total = functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def tokens(rows: int) -> tuple[UserDict[str, Tensor], UserDict[str, Tensor]]:
    ids = torch.randint(10, (rows, 6))
    labels = ids.masked_fill(torch.arange(6) > torch.arange(rows)[:, None], -100)
    return UserDict(input_ids=ids, position_ids=torch.arange(6)[None].flip(1)), UserDict(labels=labels)


@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_any_mapping_and_a_row_for_all(num_microbatches: int) -> None:
    torch.manual_seed(0)
    model = Positions()
    batch, labels = tokens(5)
    result = verify(split(model, 2, example=batch), batch, labels, token_sum, num_microbatches=num_microbatches)
    assert result.exact, result.to_text()


def test_lists_of_micro_batches_are_compared_one_by_one() -> None:
    torch.manual_seed(0)
    model = Positions()
    batches, labels = (list(column) for column in zip(*map(tokens, (3, 1, 4)), strict=True))
    batches[1] = UserDict({name: tensor[:, :4] for name, tensor in batches[1].items()})
    labels[1] = UserDict(labels=labels[1]["labels"][:, :4])
    stages = split(model, 2, example=batches[0])
    result = verify(stages, batches, labels, token_sum, num_microbatches=3)
    assert result.exact, result.to_text()
    assert result.notes == ("micro-batches that are given as a list were compared one by one, not as one batch",)


def test_a_contrastive_loss() -> None:
    model, x = sequential()

    def loss_fn(output: Tensor, _: Tensor) -> Tensor:
        return functional.cross_entropy(output @ output.T, torch.arange(len(output)))

    result = verify(split(model, 2), x, x, loss_fn)
    assert result.reasons[0].startswith("loss_fn is not a mean over rows: from equal outputs it makes")
    assert "if it compares or mixes rows, as a contrastive loss does" in result.reasons[0]


def divided_by_all(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="sum") / 8


def plain_sum(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="sum")


@pytest.mark.parametrize("fp64", [True, False])
@pytest.mark.parametrize("loss_fn", [divided_by_all, plain_sum])
def test_a_loss_that_is_divided_by_a_number_of_the_whole_batch(loss_fn: Any, fp64: bool) -> None:
    model, x = sequential()
    result = verify(split(model, 2), x, torch.arange(8) % 4, loss_fn, num_microbatches=4, fp64=fp64)
    assert result.by_microbatches
    (reason,) = result.reasons
    assert "sum to that of the whole batch" in reason
    assert "num_items_in_batch: let it return (sum, count)" in reason
    assert "contrastive" not in reason


def test_randomness_is_named_and_dropout_is_switched_off() -> None:
    model, x = sequential(nn.Dropout(0.5))
    result = verify(split(model, 3), x, torch.randn(8, 4), functional.mse_loss)
    assert result.exact
    assert "dropout was switched off in both models" in result.notes
    model, x = sequential(nn.Dropout(0.5), Calls(lambda _, x: x + 0.1 * torch.randn_like(x)))
    result = verify(split(model, 3), x, torch.randn(8, 4), functional.mse_loss)
    assert not result.exact
    assert result.reasons[0].startswith("the forward draws random numbers besides dropout")


class Functional(nn.Module):
    """Dropout as functions and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.cut = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)[:, None]
        x = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)[:, 0]
        return self.second(self.cut(x))


def test_dropout_inside_attention_is_switched_off() -> None:
    torch.manual_seed(0)
    model, x = Functional(), torch.randn(8, WIDTH)
    assert verify(split(model, 2, example=x), x, x, functional.mse_loss).exact


def test_a_parameter_without_gradient_and_one_that_the_model_lacks() -> None:
    model, x = sequential()
    own = nn.Linear(WIDTH, WIDTH)
    detached = Calls(lambda s, x: s.layer(x).detach() + 0 * s.own(x), layer=model[0], own=own)
    result = verify(by_hand(model, detached, model[1]), x, torch.randn(8, 4), functional.mse_loss)
    assert not result.exact
    assert any(reason.startswith("'0.weight' gets no gradient in stage 0") for reason in result.reasons)
    stages = by_hand(model, model[0], nn.Sequential(nn.Linear(WIDTH, 4)))
    result = verify(stages, x, torch.randn(8, 4), functional.mse_loss)
    assert any(reason.startswith("no stage has the parameter '1.weight'") for reason in result.reasons), (
        result.to_text()
    )
    assert any("trains '0.weight', which the unsplit model does not have" in reason for reason in result.reasons)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_a_tie_that_was_cut() -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(4, WIDTH)
    stages = by_hand(model, nn.Sequential(model.first, nn.Tanh()), copy.deepcopy(model.second))
    result = verify(stages, x, x, functional.mse_loss)
    assert not result.exact
    assert result.reasons[0].startswith("'first.weight' is one weight in the unsplit model, but stage 0 and stage 1")
    tied = by_hand(model, nn.Sequential(model.first, nn.Tanh()), model.second)
    assert verify(tied, x, x, functional.mse_loss).exact


def test_other_weights() -> None:
    stages, x, target = sliding(2, copied=True)
    named = by_hand(stages.unsplit, HandMade([*stages[0].layers, *stages[1].layers], 2, stages[1].head))
    with torch.no_grad():
        named[0].head.weight.add_(1)
    result = verify(named, x, target, functional.mse_loss)
    assert not result.exact
    assert result.comparisons[0].is_equal
    assert result.reasons[0].startswith("'head.weight' has different values in stage 0 and in the unsplit model")


class Reads(nn.Module):
    """Keyword inputs, and buffers that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.cut = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), CutPoint()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.second(self.cut(self.norm(self.first(x))) * scale)


def test_everything_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = Reads()
    batch = {"x": torch.randn(4, WIDTH), "scale": torch.rand(4, 1)}
    stages = split(model, 2, example=batch)
    functional.mse_loss(model(**batch), torch.zeros(4, 4)).backward()
    tensors = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    gradients = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    random_state = torch.get_rng_state()
    result = verify(stages, batch, torch.zeros(4, 4), functional.mse_loss, num_microbatches=1)
    assert result.exact, result.to_text()
    for name, (tensor, value) in tensors.items():
        now = model.state_dict(keep_vars=True)[name]
        assert now is tensor
        assert now.dtype == value.dtype
        assert torch.equal(now, value)
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name][0]
        assert torch.equal(parameter.grad, gradients[name][1])
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_model_on_the_meta_device_gets_the_stages_weights() -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(4, WIDTH)
    with torch.device("meta"):
        empty = Tied()
    first, last = (Calls(lambda s, x: s.first(x), first=layer) for layer in (model.first, model.second))
    result = verify(by_hand(empty, first, nn.Tanh(), last), x, x, functional.mse_loss)
    assert result.exact, result.to_text()
    with pytest.raises(PipelineError, match=r"no stage has its 'first\.weight'"):
        verify(by_hand(empty, nn.Sequential(model.first, nn.Tanh()), model.second), x, x, functional.mse_loss)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give verify a loss_fn"),
        ({"loss_fn": functional.mse_loss, "against": "rows"}, "'batch' or 'microbatches'"),
        ({"loss_fn": functional.mse_loss, "targets": None}, "got targets=None"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    model, x = sequential()
    with pytest.raises(PipelineError, match=words):
        verify(split(model, 2), x, **{"targets": torch.randn(8, 4)} | options)
