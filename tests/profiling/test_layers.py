"""profile_layers: cuts, optimizers, estimates and the cache; no test here looks at how long anything took."""

import copy
import itertools
import random
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from rota import CutPoint, FormatError, LayerCosts, PipelineError, Stages, split
from rota.models import finest
from rota.profiling import DEVICES, clocks
from rota.profiling.clocks import WallClock
from rota.profiling.roofline import Kernels, Roofline
from support.layered_models import MAKE, case
from support.odd_stages import Calls
from support.profiles import profile, profile_layers, profile_model


@pytest.mark.parametrize("name", MAKE)
def test_every_cut_is_found_and_split_takes_its_name(name: str) -> None:
    of = case(name)
    stages, cuts = finest(of.model, of.batch)
    assert len(stages) == len(cuts) + 1 == {"gpt": 3, "resnet": 11, "two branches": 5}[name]
    for cut in cuts:
        assert len(split(of.model, 2, [cut], example=of.batch)) == 2


def profile_stages(model: nn.Module, *batch: Any, **how: Any) -> Any:
    return profile(split(model, 2), *batch, here=True, **how)


@pytest.mark.parametrize("measure", [profile_layers, profile_stages])
def test_all_random_states_are_left_as_they_were(measure: Any) -> None:
    draws = Calls(lambda _, x: x * random.random() * np.random.rand())  # as layers that are dropped at random do
    model = nn.Sequential(nn.Linear(4, 4), draws, nn.Dropout(), nn.Linear(4, 1))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
    measure(model, torch.ones(3, 4), repeats=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == before[2:]


def test_the_model_is_not_touched_and_progress_is_told() -> None:
    model, told = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1)), list[str]()
    before, drawn, num_threads = copy.deepcopy(model.state_dict()), torch.get_rng_state(), torch.get_num_threads()
    layers = profile_layers(model, torch.ones(3, 4), optimizer=torch.optim.SGD, repeats=1, report=told.append)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(drawn, torch.get_rng_state())
    assert torch.get_num_threads() == num_threads
    assert len(told) == 4
    assert told[1].startswith("layer 2 of 4 (1): F ")
    assert layers.changed_bytes == (0, 4 * 4 * 2 + 8, 0, 0)
    assert len(layers.spread) == 4


def test_a_layer_that_fails_names_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(PipelineError, match=r"layer 2 of 3 \(1\) failed while profiling: RuntimeError: .*mat1"):
        profile_layers(model, torch.zeros(1, 2))


def test_stages_by_hand_are_layers_too() -> None:
    layers = profile_layers(Stages([nn.Linear(2, 2) for _ in range(3)]), torch.zeros(1, 2), repeats=1)
    assert layers.cuts == ("1", "2")
    with pytest.raises(PipelineError, match="edge 1 -> 0 leads back"):
        profile_layers(Stages([nn.Linear(2, 2)] * 2, [(1, 0)]), torch.zeros(1, 2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.cut = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), CutPoint()
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.cut(self.embed(tokens)))
        return logits


def test_an_optimizer_s_state_and_tied_weights_count_once_in_a_stage() -> None:
    layers = profile_layers(Tied(), torch.zeros(3, dtype=torch.int64), optimizer=torch.optim.AdamW, repeats=1)
    weight = 10 * 4 * 4
    all_of_it = 4 * weight + 4  # with its gradient, two moments, and the number of steps
    assert layers.optimizer_bytes == (2 * weight + 4,) * 2
    assert layers.stages([0, 1, 2]).static_bytes == (all_of_it, all_of_it)
    assert layers.stages([0, 2]).static_bytes == (all_of_it,)
    plain = profile_layers(Tied(), torch.zeros(3, dtype=torch.int64), optimizer=torch.optim.SGD, repeats=1)
    assert plain.optimizer_bytes == (0, 0)
    frozen = profile_layers(Tied().requires_grad_(False), torch.zeros(3, dtype=torch.int64), repeats=1)
    assert (frozen.gradient_bytes, frozen.stages([0, 2]).static_bytes) == ((0, 0), (weight,))


@pytest.mark.parametrize("together", [False, True])
def test_times_are_medians_of_runs_after_a_warm_up(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run, and one in the middle, take 100 µs for each part, and every other one 2 and 3 µs."""
    runs = itertools.count(1)
    now_ns = 0

    def run(mark: Any) -> None:
        nonlocal now_ns
        us = (100, 100) if next(runs) in (1, 5) else (2, 3)
        for each in (*us, 0):
            mark()
            now_ns += 1000 * each

    monkeypatch.setattr(clocks.time, "perf_counter_ns", lambda: now_ns)
    laps = WallClock().timed(run, 5, 9_999, together)  # two runs take that long
    assert laps.us == [2.0, 3.0]
    assert next(runs) - 1 == 2 + 5 * 2
    assert laps.spread == 0.0


def test_flops_of_a_gpt_block_are_those_of_the_formula() -> None:
    of, rows, length, width = case("gpt"), 5, 64, 32
    block = of.model.whole.blocks[1].to("meta")
    x = torch.empty(rows, length, width, device="meta", requires_grad=True)
    clock = Roofline(DEVICES["cpu-core"])
    with Kernels(DEVICES["cpu-core"]), clock:
        out = block(x)
        forward = clock.num_flops
        out.backward(torch.empty_like(out))
    linear, attention = 24 * rows * length * width**2, 4 * rows * length**2 * width
    assert forward == linear + attention
    # Each linear layer twice; attention's kernel computes five products for the forward's two.
    assert clock.num_flops - forward == 2 * linear + attention * 5 // 2


def test_large_layers_are_faster_where_the_device_is() -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096, device="meta", dtype=torch.bfloat16) for _ in range(2)))
    batch = torch.empty(2048, 4096, dtype=torch.bfloat16)
    by_device = {name: profile_layers(model, batch, device=name) for name in ("rtx-4090", "a100-80gb", "h100", "h200")}
    times = [sum(layers.forward_us) for layers in by_device.values()]
    assert times[0] > times[1] > times[2] == times[3]
    flops = 2 * 2048 * 4096**2
    assert by_device["h100"].forward_us[0] == round(1e6 * flops / (989e12 * 0.65))
    assert by_device["h100"].note == "estimated for h100"


def test_a_gpu_s_attention_keeps_no_matrix_and_its_dropout_a_byte_an_element() -> None:
    class Attend(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.view(2, 512, 4, 16).transpose(1, 2)
            out = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            return functional.dropout(out.transpose(1, 2).reshape(2, 512, 64), 0.1)

    model = nn.Sequential(nn.Linear(64, 64), Attend())
    for dtype in (torch.bfloat16, torch.float32):
        layers = profile_layers(model.to(dtype), torch.empty(2, 512, 64, dtype=dtype), device="h100")
        size = 2 * 512 * 64
        assert layers.kept_bytes[1] < 2 * size * dtype.itemsize + size + 2 * 4 * 512 * 4 + 1000
    training, evaluating = (
        profile_layers(nn.Sequential(nn.Linear(8, 8), nn.Dropout()).train(mode), torch.zeros(4, 8), device="h100")
        for mode in (True, False)
    )
    assert (training.kept_bytes[1], evaluating.kept_bytes[1]) == (4 * 8, 0)


def test_what_cannot_be_estimated_is_told() -> None:
    with pytest.raises(PipelineError, match=r"'A100'; did you mean a100-40gb or a100-80gb\? known devices are"):
        profile_layers(nn.Linear(2, 2), torch.zeros(1, 2), device="A100")
    with pytest.raises(PipelineError, match=r"times cannot be estimated for device 'h10'; did you mean h100\?"):
        profile_layers(nn.Linear(2, 2), torch.zeros(1, 2), device="h10")
    with pytest.raises(PipelineError, match="the model is on the meta device, which computes nothing; name one"):
        profile_layers(nn.Linear(2, 2, device="meta"), torch.zeros(1, 2))


def test_nothing_is_measured_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerCosts, "why_doubtful", "")  # what a busy machine disturbs is measured again
    of, told = case("two branches"), list[str]()
    options: dict[str, Any] = {"cache": tmp_path, "report": told.append, "repeats": 1}
    first = profile_layers(*of, **options)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("twobranches-")
    assert len(told) == 5
    assert profile_layers(*of, **options) == first
    assert told[5:] == [f"8 rows: from {file}"]

    def make_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(rows, 16), torch.zeros(rows, 4)

    both = profile_model(of.model, make_batch, [8, 4], of.loss_fn, **options)
    assert both[8] == first
    assert [*both] == [4, 8]
    assert len(told) == 6 + 5 + 1
    assert [*profile_model(of.model, make_batch, [4], of.loss_fn, **options)] == [4]
    estimated = profile_layers(*of, cache=tmp_path, device="h100")
    assert {path.name for path in tmp_path.iterdir()} == {file.name, "twobranches-h100.json"}
    assert estimated != first


def test_a_stale_profile_is_refused_by_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    batch, wide = torch.zeros(2, 4), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    profile_layers(wide, batch, device="h100", cache=file)

    def told(model: nn.Module = wide, x: torch.Tensor = batch, device: str = "h100", **options: Any) -> str:
        with pytest.raises(PipelineError, match=r"is stale: .*\. Profile again with refresh=True") as error:
            profile_layers(model, x, device=device, cache=file, **options)
        return str(error.value)

    assert "model was 2 layers, 76 parameters" in told(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4, bias=False)))
    assert "device was h100, is h200" in told(device="h200")
    assert "loss_fn was none, is mse_loss" in told(loss_fn=functional.mse_loss, target=batch)
    assert "optimizer was none, is SGD" in told(optimizer=torch.optim.SGD)
    assert "inputs of 2 rows was float32[2, 4]" in told(x=batch.double())
    assert "model was" in told(copy.deepcopy(wide).eval())
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast was off, is cpu bfloat16" in told()
    double = copy.deepcopy(wide).double()
    assert profile_layers(double, batch.double(), device="h100", cache=file, refresh=True).parameter_bytes == (320, 288)
    assert "model was" in told()
    file.write_text("{}")
    with pytest.raises(FormatError, match=r"profile\.json: not a profile file: .*; remove it, or profile again"):
        profile_layers(wide, batch, device="h100", cache=file)


def test_a_class_that_has_changed_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def model_of(body: str) -> nn.Module:
        path = tmp_path / f"layer_{abs(hash(body))}.py"
        source = "class Layer(nn.Module):\n    def forward(self, x):\n        " + body
        path.write_text(source)
        namespace: dict[str, Any] = {"nn": nn, "__name__": path.stem}
        exec(compile(source, str(path), "exec"), namespace)
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, path.stem, module)
        made: nn.Module = nn.Sequential(nn.Linear(4, 4), namespace["Layer"]())
        return made

    file, batch = tmp_path / "profile.json", torch.zeros(2, 4)
    profile_layers(model_of("return x * 2"), batch, device="h100", cache=file)
    with pytest.raises(PipelineError, match="stale: source of the model's classes was"):
        profile_layers(model_of("return x * 3"), batch, device="h100", cache=file)
