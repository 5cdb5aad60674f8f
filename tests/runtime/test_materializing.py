"""Models made without weights: each process initializes its own stages, and what nobody has filled is refused."""

import copy
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import rota
from rota import PipelineError, Stages
from support import ROOT
from support.hf_models import CASES


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_weights_do_not_depend_on_cuts_and_ranks(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    ordinary = state_of(case.make_model())
    with rota.meta_init():
        models = [case.make_model() for _ in range(3)]
    assert all(parameter.is_meta for model in models for parameter in model.parameters())
    batch = case.make_batch(4, 8, 1)
    whole, halves, again = Stages([models[0]]), *(rota.split(m, 2, case.cuts, example=batch) for m in models[1:])
    before = torch.get_rng_state()
    rota.materialize(whole, [0])
    rota.materialize(halves, [0, 1])
    rota.materialize(again, [1])
    assert torch.equal(torch.get_rng_state(), before)
    expected = state_of(models[0])
    for stages, local in ((halves, (0, 1)), (again, (1,))):
        for stage in local:
            for path, tensor in state_of(stages[stage]).items():
                assert torch.equal(tensor, expected[path]), path
    elsewhere = {*again[0].parameters()} - {*again[1].parameters()}
    assert all(parameter.is_meta for parameter in elsewhere)
    for path, tensor in ordinary.items():  # drawn from the same distributions
        assert tensor.std().item() == pytest.approx(expected[path].std().item(), rel=0.2, abs=1e-3), path
    loss, wanted = (
        case.loss_fn(output, case.make_targets(batch)) for output in (halves.run(batch), models[0](**batch))
    )
    torch.testing.assert_close(loss, wanted)


class Layers(nn.Module):
    """Its own weight, one that a module of PyTorch holds, and a buffer that only the constructor knows."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("scale", torch.arange(4.0), persistent=False)
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x * self.position + self.scale)
        return x


def init(module: Any) -> None:
    if hasattr(module, "position"):
        nn.init.normal_(module.position)
    if isinstance(module, nn.Linear):
        module.weight.data.uniform_(-1, 1)
        for row in module.bias:
            row.fill_(2)


def test_a_function_of_ones_own_is_seeded_by_names() -> None:
    made = []
    for seed, num_stages in ((1, 1), (1, 3), (2, 3)):
        with rota.meta_init():
            model = Layers()
        stages = rota.split(model, num_stages, example=(torch.ones(2, 4),))
        torch.manual_seed(seed)
        rota.materialize(stages, range(num_stages), init=init)
        assert model.layers[2].weight is model.layers[0].weight
        made.append(state_of(model))
    assert all(torch.equal(made[0][path], made[1][path]) for path in made[0])
    assert torch.equal(made[0]["scale"], torch.arange(4.0))
    for path in ("layers.0.weight", "position"):
        assert not torch.equal(made[0][path], made[2][path])
    assert not torch.equal(made[0]["layers.0.weight"], made[0]["layers.1.weight"])


def test_stages_by_hand_are_not_alike() -> None:
    with rota.meta_init():
        stages = Stages([nn.Linear(4, 4), nn.Linear(4, 4)])
        grouped = rota.split(Stages([nn.Linear(4, 4), nn.Linear(4, 4)]), 1)
    rota.materialize(stages, [0, 1])
    rota.materialize(grouped, [0])
    assert not torch.equal(stages[0].weight, stages[1].weight)  # type: ignore[arg-type]
    assert torch.equal(stages[1].weight, grouped[0].get_parameter("1.weight"))  # type: ignore[arg-type]


def half(module: Any) -> None:
    if isinstance(module, nn.Linear):
        module.weight[:2].fill_(1)
        module.bias.fill_(1)


def other(module: Any) -> None:
    if isinstance(module, nn.Linear):
        module.bias = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("init", "told"),
    [
        (None, "position of stage 0: nobody has given it values. let materialize(…, init=fn) fill it"),
        (lambda module: None, "position of stage 0, layers.0.weight of stage 0, layers.0.bias of stage 0 and 4 more"),
        (half, "position of stage 0, layers.0.weight of stage 0, layers.1.weight of stage 0 and 1 more: nobody"),
        (other, "init makes another parameter of layers.0.bias of stage 0: let it fill the one that is there"),
    ],
)
def test_what_nobody_fills_is_refused(init: Any, told: str) -> None:
    with rota.meta_init():
        stages = rota.split(Layers(), 1)
    with pytest.raises(PipelineError, match=re.escape(told)):
        rota.materialize(stages, [0], init=init)


def test_buffers_that_are_on_meta_are_refused_unless_they_are_filled() -> None:
    with torch.device("meta"):
        model, again, norm = Layers(), Layers(), nn.BatchNorm1d(4)
    with pytest.raises(PipelineError, match=r"scale of stage 0: nobody .* or make the model in `with rota.meta_init"):
        rota.materialize(rota.split(model, 1), [0], init=init)

    def init_all(module: Any) -> None:
        init(module)
        if isinstance(module, Layers):
            module.scale = torch.arange(4.0)

    rota.materialize(rota.split(again, 1), [0], init=init_all)
    assert torch.equal(again.scale, torch.arange(4.0))
    rota.materialize(Stages([norm]), [0])
    assert torch.equal(norm.running_var, torch.ones(4))
    with pytest.raises(PipelineError, match="local has stage 3, but the stages are 0 to 0"):
        rota.materialize(Stages([norm]), [3])


def test_memory_that_is_shared_on_meta_is_refused() -> None:
    with rota.meta_init():
        layer = nn.Linear(4, 4)
        layer.register_buffer("first", layer.weight.detach()[0])
    with pytest.raises(PipelineError, match=r"first of stage 0 and weight of stage 0 share memory|weight of stage 0"):
        rota.materialize(Stages([layer]), [0])


def test_a_model_with_weights_keeps_them_and_lets_go_of_others() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = copy.deepcopy(model.state_dict())
    rota.materialize(rota.split(model, 2), [0])
    assert torch.equal(model[0].weight, expected["0.weight"])
    assert model[1].weight.is_meta


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

with rota.meta_init():  # loads what torch needs for it
    warm = nn.Linear(256, 256)
rota.materialize(rota.Stages([warm]), [0])
before = peak()
with rota.meta_init():
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
        [sys.executable, "-c", PEAK, "2"], cwd=ROOT, capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 0.2 < float(done.stdout) < 0.4
