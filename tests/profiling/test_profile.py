"""Measured costs: bytes counted independently, times of known work, nothing touched."""

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rota import Costs, PipelineError, Stages
from rota.core.text import count_text
from rota.profiling import clocks
from support.profiles import profile

pytestmark = pytest.mark.dist


class TwoLayers(nn.Module):
    """Keeps its input (the first Linear), the hidden layer (the second) and, for ReLU, its output: the same storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


def test_bytes_are_those_that_autograd_keeps() -> None:
    stages = Stages([TwoLayers(), TwoLayers()])
    costs = profile(stages, torch.zeros(5, 8), repeats=1)
    hidden, boundary, parameters = 5 * 16 * 4, 5 * 8 * 4, (8 * 16 + 16 + 16 * 8 + 8) * 4
    assert costs.activation_bytes == (hidden, boundary + hidden)  # the step's own batch is not the first stage's
    assert costs.boundary_bytes == costs.gradient_bytes == (boundary,)
    assert costs.static_bytes == (2 * parameters, 2 * parameters)
    assert costs.edges == ((0, 1),)


def test_inputs_and_weights_apart() -> None:
    stages = Stages([TwoLayers(), TwoLayers(), nn.Sequential(nn.Tanh(), nn.Linear(8, 8))])
    costs = profile(stages, torch.zeros(5, 8), repeats=1, split_backward=True)
    assert costs.weight_us is not None
    assert costs.backward_us[0] == 0 < min(costs.backward_us[1:])
    assert min(costs.weight_us) > 0
    hidden, boundary = 5 * 16 * 4, 5 * 8 * 4
    assert costs.activation_bytes == (hidden, boundary + hidden, boundary)
    # W keeps all of it, the layers' inputs, and on top the gradients of their outputs.
    assert costs.freed_by_input == (-boundary, -(hidden + boundary), -boundary)


def test_integers_travel_but_have_no_gradient() -> None:
    class Tokens(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * torch.ones(3, requires_grad=True), torch.arange(7)

    class Reader(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return pair[0].sum()

    costs = profile(Stages([Tokens(), Reader()]), torch.zeros(3), repeats=1)
    assert (costs.boundary_bytes, costs.gradient_bytes) == ((3 * 4 + 7 * 8,), (3 * 4,))


def test_the_model_is_not_touched() -> None:
    stages = Stages([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()), nn.Linear(4, 1)])
    before = copy.deepcopy([module.state_dict() for module in stages.modules])
    random = torch.get_rng_state()
    costs = profile(stages, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), repeats=2)
    for module, state in zip(stages.modules, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
        assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert min(costs.forward_us + costs.backward_us) > 0


def test_times_are_those_of_each_stages_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the stages themselves put on."""
    now_ns = 0

    def passes(us: int) -> None:
        nonlocal now_ns
        now_ns += 1000 * us

    class Lasting(nn.Module):
        def __init__(self, us: int) -> None:
            super().__init__()
            self.us, self.layer = us, nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            passes(self.us)
            y: torch.Tensor = self.layer(x)
            y.register_hook(lambda _: passes(2 * self.us + 1))
            return y

    monkeypatch.setattr(clocks.time, "perf_counter_ns", lambda: now_ns)
    costs = profile(Stages([Lasting(2), Lasting(40)]), torch.zeros(3, 4), repeats=3, here=True)
    assert (costs.forward_us, costs.backward_us) == ((2, 40), (5, 81))


def test_ranks_that_share_cores_are_told() -> None:
    told: list[str] = []
    num_ranks = len(os.sched_getaffinity(0)) + 1
    stages = Stages([nn.Linear(2, 2) for _ in range(2 * num_ranks)])
    ranks = [stage % num_ranks for stage in range(2 * num_ranks)]
    costs = profile(stages, torch.zeros(1, 2), ranks=ranks, repeats=1, report=told.append)
    shared = f"{num_ranks} ranks share {count_text(num_ranks - 1, 'core')}"
    assert shared in told[0]
    assert shared in costs.note


def test_a_stage_that_fails_is_named() -> None:
    stages = Stages([nn.Linear(2, 2), nn.Linear(3, 3), nn.Linear(3, 3)])
    with pytest.raises(PipelineError, match=r"stage 1 failed while profiling: RuntimeError"):
        profile(stages, torch.zeros(1, 2), repeats=1)


class EndsItsProcess(nn.Module):
    """Unless it is the one that made it."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.process, self.act = os.getpid(), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.process:
            self.act()
        return x


@pytest.mark.parametrize(
    ("act", "how"), [(lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9"), (lambda: os._exit(0), "exit code 0")]
)
def test_a_process_that_is_gone_is_noticed_by_those_that_wait_for_it(act: Callable[[], Any], how: str) -> None:
    """The first two are at a barrier by then."""
    stages = Stages([nn.Linear(2, 2), nn.Linear(2, 2), EndsItsProcess(act)])
    with pytest.raises(PipelineError, match=f"measuring process 2 ended with {how} before it had a result"):
        profile(stages, torch.zeros(1, 2), repeats=1)


@pytest.mark.parametrize("split", [False, True])
def test_in_this_process_the_bytes_are_the_same(split: bool) -> None:
    stages = Stages([TwoLayers(), TwoLayers()])
    x, state, num_threads = torch.zeros(5, 8), torch.get_rng_state(), torch.get_num_threads()
    apart = profile(stages, x, repeats=1, split_backward=split)
    here = profile(stages, x, repeats=1, split_backward=split, here=True)
    for name in ("activation_bytes", "input_frees_bytes", "boundary_bytes", "gradient_bytes", "static_bytes", "edges"):
        assert getattr(here, name) == getattr(apart, name)
    assert all(us > 0 for us in here.backward_us[1:])
    assert all(parameter.grad is None for _, parameter in stages.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == num_threads
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        profile(stages, torch.zeros(5, 9), here=True)
    assert torch.get_num_threads() == num_threads


def test_recomputed_stages_an_optimizer_and_the_spread() -> None:
    stages, told = Stages([TwoLayers(), TwoLayers(), nn.Linear(8, 8)]), list[str]()
    adam = torch.optim.Adam
    costs = profile(stages, torch.zeros(5, 8), recompute=[1], optimizer=adam, repeats=2, report=told.append)
    hidden, boundary, parameters = 5 * 16 * 4, 5 * 8 * 4, 8 * 16 + 16 + 16 * 8 + 8
    assert [us is None for us in costs.recompute_us] == [True, False, True]
    assert costs.checkpoint_bytes == (0, boundary, 0)
    assert costs.activation_bytes == (hidden, boundary + hidden, boundary)
    assert costs.static_bytes[:2] == (4 * parameters * 4 + 4 * 4,) * 2  # Adam counts its steps for each of 4 tensors
    assert costs.state_bytes[:2] == (3 * parameters * 4 + 4 * 4,) * 2  # without gradients
    assert min(costs.forward_peak_bytes + costs.backward_peak_bytes) > 0
    assert told[1].startswith(f"F and B of a stage vary by {costs.spread:.0%} at most")
    assert costs.spread_us is not None
    assert Costs.from_json(costs.to_json()) == costs
    for options in ({"recompute": [3]}, {"recompute": ["full"]}):
        with pytest.raises(PipelineError, match=r"recompute has stage .*, but there are stages 0 to 2"):
            profile(stages, torch.zeros(5, 8), **options)


def test_stages_without_numbers_cannot_be_measured() -> None:
    with pytest.raises(PipelineError, match=r"stage 1 is on meta; .* Estimate with profile_layers"):
        profile(Stages([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")]), torch.zeros(1, 2))
