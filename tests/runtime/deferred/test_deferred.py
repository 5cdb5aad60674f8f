"""Models made without memory get, stage by stage, the weights that they would have had, to the last bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import rota
from rota import PipelineError, Stages
from rota.runtime.deferred import construction
from support import ROOT
from support.hf_models import CASES

#: Their experts are chosen by numbers, which a forward on the meta device does not have.
CHOOSE_BY_NUMBERS = ("mixtral", "qwen3_moe")


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(construction, "SMALL_BYTES", 0)


def made_twice(make: Callable[[], nn.Module], seed: int = 3) -> tuple[nn.Module, nn.Module]:
    """As usual, and without memory; random numbers go on alike afterwards."""
    torch.manual_seed(seed)
    whole, after = make(), torch.rand(3)
    torch.manual_seed(seed)
    with rota.deferred_init():
        without = make()
    assert torch.equal(torch.rand(3), after)
    return whole, without


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def assert_same(module: nn.Module, expected: nn.Module) -> None:
    for (name, tensor), (expected_name, value) in zip(tensors_of(module), tensors_of(expected), strict=True):
        assert name == expected_name
        assert (type(tensor), tensor.requires_grad) == (type(value), value.requires_grad)
        assert (tensor.dtype, tensor.device, tensor.stride()) == (value.dtype, value.device, value.stride()), name
        assert torch.equal(tensor, value), name


@pytest.mark.parametrize("name", CASES)
def test_unmodified_models_are_initialised_as_ever(name: str) -> None:
    whole, without = made_twice(CASES[name].make)
    assert any(parameter.is_meta for parameter in without.parameters())
    rota.materialize(Stages([without]), [0])
    assert_same(without, whole)


@pytest.mark.parametrize("name", [name for name in CASES if name not in CHOOSE_BY_NUMBERS])
def test_local_stages_get_memory_and_compute(name: str) -> None:
    case = CASES[name]
    whole, without = made_twice(case.make_model)
    batch = case.make_batch(4, 8, 1)
    expected, stages = (rota.split(model, 2, case.cuts, example=batch) for model in (whole, without))
    assert stages.cuts == expected.cuts
    rota.materialize(stages, [1])
    assert_same(stages[1], expected[1])
    local = {*stages[1].parameters()}
    assert all(parameter.is_meta for parameter in stages[0].parameters() if parameter not in local)
    assert stages.ties == expected.ties

    case.make_model()  # draws
    stages = rota.split(made_twice(case.make_model)[1], 2, case.cuts, example=batch)
    rota.materialize(stages, [0, 1])
    loss, wanted = (case.loss_fn(run.run(batch), case.make_targets(batch)) for run in (stages, expected))
    assert torch.equal(loss, wanted)


class Odd(nn.Module):
    """What constructors do besides filling weights."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Linear(7, 5)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.truncated = nn.Parameter(torch.empty(300))
        nn.init.trunc_normal_(self.truncated, a=3.0, b=4.0)  # draws until it likes what it has got
        self.sparse = nn.Linear(9, 9)
        nn.init.sparse_(self.sparse.weight, 0.3)
        self.dirac = nn.Conv1d(3, 3, 3)
        nn.init.dirac_(self.dirac.weight)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.turned = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)  # copies one
        self.recurrent = nn.LSTM(3, 4)  # has weak references to its weights
        self.half = nn.Linear(4, 4).to(torch.bfloat16)
        self.compiled = torch.compile(nn.Linear(3, 3))
        self.rows = nn.Parameter(torch.zeros(6, 4))
        self.rows.data[2].normal_()
        self.rows.data[3] = self.rows.data[2] * 2
        self.rows.data[4] = 7
        self.doubled = nn.Parameter(torch.rand(3))
        self.doubled.data = torch.from_numpy(self.doubled.detach().numpy() * 2)
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(20)))
        self.coins = nn.Parameter(torch.rand(8).bernoulli_(torch.rand(8)))
        self.chosen = nn.Parameter(torch.multinomial(torch.rand(10), 3).float())
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 4)]
        self.positive = nn.Parameter((draws := torch.randn(9))[draws > 0])
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5), persistent=False)
        self.register_buffer("order", torch.randperm(20))
        self.plain = torch.arange(6.0) / 3
        torch.set_default_dtype(torch.float64)
        try:
            self.wide = nn.Parameter(torch.arange(0, 4, 0.5))
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.filterwarnings("ignore:mean is more than 2 std")
def test_whatever_a_constructor_does() -> None:
    whole, without = made_twice(Odd)
    assert isinstance(whole, Odd)
    assert isinstance(without, Odd)
    assert (without.rates, without.plain.is_meta) == (whole.rates, True)
    rota.materialize(Stages([without]), [0])
    assert_same(without, whole)
    assert torch.equal(without.plain, whole.plain)
    x = torch.rand(2, 5, 3)
    assert torch.equal(without.recurrent(x)[0], whole.recurrent(x)[0])


def test_generators_of_ones_own_go_on_too() -> None:
    def make() -> nn.Module:
        generator = torch.Generator().manual_seed(8)
        model = nn.Linear(4, 4)
        model.weight.data.normal_(generator=generator)
        model.bias.data.uniform_(generator=generator)
        return model

    whole, without = made_twice(make)
    rota.materialize(Stages([without]), [0])
    assert_same(without, whole)


def test_a_model_to_be_loaded_draws_nothing() -> None:
    before = torch.get_rng_state()
    with rota.deferred_init(to_load=True):
        model = nn.Linear(4, 4)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(PipelineError, match=r"weight of stage 0, bias of stage 0: its random numbers were not drawn"):
        rota.materialize(Stages([model]), [0])


def test_what_nothing_is_known_of_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(PipelineError, match=r"weight of stage 0, bias of stage 0: on the meta device"):
        rota.materialize(Stages([model]), [0])
    with rota.deferred_init():
        changed = nn.Linear(4, 4)
    changed.double()
    with pytest.raises(PipelineError, match="including its dtype and all changes to its weights"):
        rota.materialize(Stages([changed]), [0])
    with pytest.raises(PipelineError, match="local has stage 3, but the stages are 0 to 0"):
        rota.materialize(Stages([model]), [3])
    with rota.deferred_init(), pytest.raises(PipelineError, match="reads a tensor on the meta device"):
        torch.zeros(4).add_(torch.empty(4, device="meta"))


def test_an_array_of_a_weight_cannot_be_written_into() -> None:
    with rota.deferred_init():
        array = torch.ones(4).numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2


PEAK = """
import sys
import torch
from torch import nn
import rota
from rota.runtime.meshes import local_stages  # torch and all of the runtime are loaded

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def make():
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(48)))

with rota.deferred_init():  # loads what torch needs for it
    warm = nn.Linear(256, 256)
rota.materialize(rota.Stages([warm]), [0])
before = peak()
with rota.deferred_init():
    model = make()
num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
stages = rota.split(model, 4)
rota.materialize(stages, [int(sys.argv[1])])
assert not any(parameter.is_meta for parameter in stages[int(sys.argv[1])].parameters())
print((peak() - before) / num_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_holds_its_own_stage_alone() -> None:
    """200 MB in all, 50 MB here."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stderr
    assert 0.2 < float(done.stdout) < 0.4
