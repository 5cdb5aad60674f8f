"""What stages of unmodified models do with other modes, inputs and models than the recorded ones."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rota import PipelineError, SplitError, Stages, materialize, split
from rota.models import finest
from rota.models.carving.operations import OnMeta
from support.hf_models import CASES, gpt2
from support.profiles import profile, profile_layers

from .test_models import assert_as_whole

WIDTH = 6


class Blocks(nn.Module):
    """Four layers; `between` is what the forward does after the second."""

    def __init__(
        self, between: Callable[[Any, Tensor], Tensor] | None = None, layer: Callable[[int, int], nn.Module] = nn.Linear
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(WIDTH, WIDTH) for _ in range(4))
        self.between = between

    def forward(self, x: Tensor, scale: Tensor | None = None, *, shift: Any = None, **more: Any) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 1 and self.between is not None:
                x = self.between(self, x)
        if scale is not None:
            x = x * scale
        for value in more.values():
            x = x + value
        return x if shift is None else x + shift


def rows(count: int = 3) -> Tensor:
    return torch.linspace(-1, 1, count * WIDTH).reshape(count, WIDTH)


def same(model: nn.Module, stages: Stages, batch: Any) -> None:
    expected = model(**batch) if isinstance(batch, dict) else model(*batch)
    torch.testing.assert_close(stages.run(batch), expected, rtol=0, atol=0)


def test_inputs_may_be_positional_keywords_none_plain_or_left_out() -> None:
    model = Blocks()
    x, scale = rows(), torch.full((1,), 2.0)
    stages = split(model, 2, example={"x": x, "scale": scale, "shift": 0.5, "bias": scale})
    same(model, stages, {"x": rows(5), "scale": scale, "shift": 1.5, "bias": scale * 3})
    same(model, stages, {"x": x, "scale": scale})
    same(model, stages, {"x": x, "shift": None, "bias": scale})
    same(model, stages, (x, scale))
    same(model, split(model, 3, example=(x,)), (x,))
    same(model, split(model, 3, example=x), (x,))


def test_an_input_that_the_example_lacks_is_refused() -> None:
    stages = split(Blocks(), 2, example={"x": rows()})
    with pytest.raises(PipelineError, match=r"the batch has 'scale', which the example .* add it to the example"):
        stages.run({"x": rows(), "scale": torch.ones(1)})
    stages.run({"x": rows(), "scale": None})


def test_cuts_are_paths_or_patterns() -> None:
    model, example = Blocks(), {"x": rows()}
    assert split(model, 3, ["layers.1", "layers.3"], example=example).cuts == ("layers.1", "layers.3")
    assert split(model, 3, ["layers.*"], example=example).cuts == ("layers.2", "layers.3")  # the last has the head, too
    assert split(model, 2, ["layers[2]"], example=example).cuts == ("layers.2",)
    for cuts, near in (
        (["layer.1"], r"did you mean 'layers.1'"),
        (["layer.*"], r"did you mean 'layers.\*'"),
        (["layers.9"], r"did you mean 'layers.\d' or "),
    ):
        with pytest.raises(SplitError, match=rf"'{re.escape(cuts[0])}', which names no module of Blocks; {near}"):
            split(model, 2, cuts, example=example)
    inside = nn.ModuleDict({"model": Blocks()})
    with pytest.raises(SplitError, match=r"'layers.\*', which names no module of ModuleDict; .* 'model.layers.\*'"):
        split(inside, 2, ["layers.*"], example=example)
    with pytest.raises(SplitError, match=r"'zzz', which names no module of Blocks$"):
        split(model, 2, ["zzz"], example=example)
    with pytest.raises(SplitError, match=r"6 stages need 5 cuts, but there are 3"):
        split(model, 6, example=example)


def test_cuts_inside_of_one_another_are_refused() -> None:
    model, example = Blocks(layer=lambda *sizes: nn.Sequential(nn.Linear(*sizes), nn.Tanh())), {"x": rows()}
    for inner in ("layers.*.0", "layers.2.1"):
        told = rf"cuts has 'layers.\*' and '{re.escape(inner)}', but layers.\d.\d is inside layers.\d, .* leave out one"
        for cuts in (["layers.*", inner], [inner, "layers.*"]):
            with pytest.raises(SplitError, match=told):
                split(model, 2, cuts, example=example)
            with pytest.raises(SplitError, match=told):
                finest(model, example, cuts)
    assert finest(model, example, ["layers.*.1", "layers.*.0", "layers.2.0"])[1] == tuple(
        f"layers.{layer}.{part}" for layer in range(4) for part in range(2) if layer + part
    )


def test_recording_leaves_random_states_buffers_and_the_model() -> None:
    case = CASES["resnet"]
    model, example = case.make_model(), case.make_batch(2, 8, 0)
    model.resnet.embedder.register_forward_hook(lambda *_: None)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    attributes = [{**vars(module)} for module in model.modules()]
    state = torch.get_rng_state()
    split(model, 2, example=example)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert [type(module) for module in model.modules()] == [type(module) for module in copy.deepcopy(model).modules()]
    assert attributes == [{**vars(module)} for module in model.modules()]


def test_stages_survive_deepcopy_and_pickle() -> None:
    case = CASES["t5"]
    model, batch = case.make_model(), case.make_batch(2, 8, 0)
    stages = split(model, 3, example=batch)
    expected = stages.run(batch).loss
    for other in (copy.deepcopy(stages), pickle.loads(pickle.dumps(stages))):
        assert torch.equal(other.run(batch).loss, expected)
        assert len(other.ties) == len(stages.ties) == 1
        assert not {*other[0].parameters()} & {*model.parameters()}


def test_what_an_earlier_forward_has_kept_does_not_matter_to_a_profile() -> None:
    class Keeping(nn.Linear):
        """Keeps what it has computed, and with it the graph."""

        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last.tanh()

    model, x = nn.Sequential(Keeping(4, 4), Keeping(4, 4)), torch.ones(2, 4)
    model(x)
    kept, stages, loss_fn = model[0].last, split(model, 2), nn.functional.mse_loss
    assert profile(stages, x, x, loss_fn, repeats=1, here=True).num_stages == 2
    assert len(profile_layers(model, x, x, loss_fn, repeats=1).forward_us) == 2
    assert model[0].last is kept


def test_only_local_stages_keep_memory() -> None:
    model, batch = Blocks(), {"x": rows()}
    stages = split(model, 2, example=batch)
    sent = stages.call(0, [], batch)
    materialize(stages, [0])
    assert [parameter.is_meta for parameter in stages[1].parameters()] == [True] * 4
    assert torch.equal(stages.call(0, [], batch)[1]["layers.1"], sent[1]["layers.1"])


def test_training_and_evaluation() -> None:
    case = CASES["gpt2"]
    torch.manual_seed(0)
    model = gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).double()
    batch = case.make_batch(2, 8, 0)
    stages = split(model.train(), 3, example=batch)
    torch.manual_seed(1)
    expected = model(**batch).loss
    torch.manual_seed(1)
    assert torch.equal(stages.run(batch).loss, expected)
    for module in (model, *stages.modules):
        module.eval()
    assert torch.equal(stages.run(batch).loss, model(**batch).loss)
    of_evaluation = split(model.eval(), 2, example=batch)
    assert torch.equal(of_evaluation.run(batch).loss, model(**batch).loss)
    of_evaluation[0].train()
    with pytest.raises(PipelineError, match="was split in evaluation mode"):
        of_evaluation.run(batch)


@pytest.mark.parametrize(
    ("name", "cut"), [("gpt2", "transformer.h.2"), ("t5", "decoder.block.1"), ("t5", "decoder.block.0")]
)
def test_a_cache_stays_on_its_stages_wherever_the_cut_is(name: str, cut: str) -> None:
    case = CASES[name]
    model, batch = case.make_model(), case.make_batch(2, 8, 0) | {"use_cache": True}
    assert model(**batch).past_key_values is not None
    output = split(model, 2, [cut], example=batch).run(batch)
    assert output.past_key_values is None
    assert torch.equal(output.logits, model(**batch).logits)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    case = CASES["llama"]
    model = case.make_model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_as_whole(split(model, 3, example=case.make_batch(2, 8, 0)), model, case, case.make_batch(3, 9, 1))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_autocast_and_attentions(name: str, attention: str) -> None:
    case = CASES[name]
    model = case.make_model().float()
    model.set_attn_implementation(attention)
    stages = split(model, 3, example=case.make_batch(2, 8, 0))
    with torch.autocast("cpu", torch.bfloat16):
        for length in (8, 10):
            assert_as_whole(stages, model, case, case.make_batch(2, length, 1), tolerance=1e-5)


def test_dropout_between_modules_that_several_stages_read_is_refused() -> None:
    class Dropping(Blocks):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            x = F.dropout(self.layers[0](x), 0.5, training=self.training)
            return self.layers[3](self.layers[2](self.layers[1](x)) + x)

    with pytest.raises(SplitError, match=r"random numbers .* at .*test_behaviour.py:\d+ \(x = F.dropout.* a module"):
        split(Dropping(), 2, ["layers.2"], example={"x": rows()})
    split(Dropping().eval(), 2, ["layers.2"], example={"x": rows()})


def test_what_leaves_a_block_without_being_returned_is_refused() -> None:
    class Storing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x * 2
            return super().forward(x)

    class Reading(Blocks):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            for layer in self.layers:
                x = layer(x)
            return x + self.layers[0].seen

    with pytest.raises(SplitError, match=r"stage 1 reads what layers.0 makes, which neither it nor a module"):
        split(Reading(layer=Storing), 2, example={"x": rows()})


def test_control_flow_on_numbers_is_exact_or_fails() -> None:
    def branch(self: Any, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else self.layers[0](x)

    model = Blocks(branch)
    positive = {"x": rows() + 3}
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.copy_(torch.eye(WIDTH))
            layer.bias.zero_()
    stages = split(model, 4, example=positive)
    same(model, stages, {"x": rows() + 5})
    with pytest.raises(PipelineError, match=r"0 \(Linear\) on stage \d was called instead of layers.2 at .* unlike"):
        stages.run({"x": rows() - 5})


def test_a_unit_that_returns_something_else_fails() -> None:
    class Varying(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            made = super().forward(x)
            return (made, made) if len(x) > 4 else (made, None)

    class Reading(Blocks):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            for layer in self.layers:
                x, more = layer(x)
                x = x if more is None else x + more
            return x

    stages = split(Reading(layer=Varying), 2, example={"x": rows()})
    with pytest.raises(PipelineError, match=r"layers.0 \(Varying\) on stage 0 returns"):
        stages.run({"x": rows(6)})


def test_writing_into_a_received_value() -> None:
    class InPlace(Blocks):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            first = self.layers[0](x)
            second = self.layers[1](first)
            second += 1
            second.relu_()
            third = self.layers[2](second)
            third.mul_(2)
            return self.layers[3](third) + second

    model = InPlace()
    stages = split(model, 4, example={"x": rows()})
    same(model, stages, {"x": rows(5)})


def test_a_block_that_overwrites_what_later_stages_read() -> None:
    class Overwriting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return super().forward(x)

    class Reading(Blocks):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            first = self.layers[0](x.clone())
            return self.layers[2](self.layers[1](first)) + first

    with pytest.raises(SplitError, match=r"reads what layers.1 makes"):
        split(Reading(layer=Overwriting), 2, ["layers.2"], example={"x": rows()})


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "unet", "resnet"])
def test_a_model_on_meta_is_cut_as_one_with_numbers(name: str) -> None:
    case = CASES[name]
    model, example = case.make_model(), case.make_batch(2, 8, 0)
    stages = split(model, 3, case.cuts, example=example)
    on_meta = split(case.make_model().to("meta"), 3, case.cuts, example=example)
    assert on_meta.carried == stages.carried
    assert on_meta.inputs == stages.inputs
    for one, other in zip(on_meta.modules, stages.modules, strict=True):
        assert [*one.state_dict()] == [*other.state_dict()]
        one.to_empty(device="cpu").load_state_dict(other.state_dict())
        for buffer, known in zip(one.buffers(), other.buffers(), strict=True):
            buffer.copy_(known)
    batch = case.make_batch(3, 11, 1)
    expected = case.loss_fn(stages.run(batch), case.make_targets(batch))
    assert torch.equal(case.loss_fn(on_meta.run(batch), case.make_targets(batch)), expected)


def test_masks_that_attention_makes_for_itself_need_no_memory() -> None:
    """One per layer, 2**26 bytes each for a sample of 8,192 tokens."""
    with OnMeta():
        small, large = (torch.ones(length, length, dtype=torch.bool, device="meta") for length in (2048, 8192))
        on_cpu = torch.zeros(8192, 8192)
    assert (small.device.type, large.device.type, on_cpu.device.type) == ("cpu", "meta", "meta")
    assert small.all()
