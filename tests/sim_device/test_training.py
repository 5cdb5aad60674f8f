"""Training on the simulated device: the values of the CPU, bit for bit, without races and without waits of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from support.sim_device import RaceError, SimDevice, receive_into


@pytest.fixture
def device() -> Iterator[SimDevice]:
    device = SimDevice()
    with device.active():
        yield device
    device.check()


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(16), nn.Linear(16, 11)
    )


def batch() -> torch.Tensor:
    return torch.arange(12).reshape(3, 4) % 11


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.detach().cpu(), q.detach()), name
        if q.grad is not None:
            assert p.grad is not None
            assert torch.equal(p.grad.cpu(), q.grad), name


def num_syncs(device: SimDevice, work: Callable[[], object]) -> int:
    before = len(device.syncs)
    work()
    return len(device.syncs) - before


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda ps: torch.optim.AdamW(ps, 0.01),
        lambda ps: torch.optim.AdamW(ps, 0.01, foreach=False),
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    ],
    ids=["adamw", "adamw for each", "sgd"],
)
def test_steps_have_the_values_of_the_cpu(optimizer: Callable[..., torch.optim.Optimizer], device: SimDevice) -> None:
    here, there = network(), network()
    here.to("sim")
    optimizers = [optimizer(model.parameters()) for model in (here, there)]
    tokens = batch().to("sim")

    def step(model: nn.Module, inputs: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model, inputs).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        assert num_syncs(device, lambda: step(here, tokens, optimizers[0])) == 0
        step(there, batch(), optimizers[1])
    loss_of(here, tokens).backward()
    loss_of(there, batch()).backward()
    assert_same(here, there)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: SimDevice) -> None:
    model = network().to("sim")
    tokens = batch().to("sim")
    with torch.autocast("sim", dtype=dtype):
        hidden = model[1](model[0](tokens))
        normal = model[4](hidden)
        loss = loss_of(model, tokens)
    assert (hidden.dtype, normal.dtype, loss.dtype) == (dtype, torch.float32, torch.float32)
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    plain = loss_of(network(), batch())
    assert abs(loss.item() - plain.item()) < 0.02


# --- autograd and streams ---------------------------------------------------------------------------------------------


def test_a_backward_runs_on_the_streams_of_its_forward(device: SimDevice) -> None:
    side = device.stream("side")
    x = torch.ones(4, device="sim", requires_grad=True)
    y = x * 2
    side.wait_stream(device.default)
    with device.use(side):
        z = y.exp()
    device.default.wait_stream(side)
    loss = z.sum()
    kernels: list[tuple[str, str]] = []
    launch = device.launch

    def noted(name: str, *args: object) -> None:
        launch(name, *args)  # type: ignore[arg-type]
        kernels.append((name, device.stream_of_kernel().name))

    device.launch = noted  # type: ignore[method-assign, assignment]
    loss.backward()
    del device.launch
    assert ("aten::mul", "side") in kernels  # of exp
    assert kernels[-1] == ("aten::mul", "compute")  # of x * 2
    assert x.grad is not None
    assert (x.grad - 1).shape == (4,)  # the caller's stream has waited for the gradients
    assert num_syncs(device, lambda: None) == 0


def test_a_backward_from_another_stream_needs_an_event_before_and_none_after(device: SimDevice) -> None:
    x = torch.ones(4, device="sim", requires_grad=True)
    loss = (x * 2).sum()
    other = device.stream("other")
    with (
        device.use(other),
        pytest.raises(RaceError, match="aten::ones_like on other reads"),
    ):
        torch.ones_like(loss) * loss
    other.wait_stream(device.default)
    with device.use(other):
        loss.backward()
        assert x.grad is not None
        assert (x.grad * 1).sum().item() == 8


def test_an_unordered_read_in_a_backward_is_found(device: SimDevice) -> None:
    """What the forward kept is written to by another stream, of which the backward knows nothing."""
    x = torch.ones(4, device="sim", requires_grad=True)
    weight = torch.ones(4, device="sim")
    loss = (x * weight).sum()
    side = device.stream("side")
    side.wait_stream(device.default)
    receive_into(weight, torch.zeros(4), "receive", side)  # type: ignore[arg-type]
    loss.backward()
    with pytest.raises(RaceError, match=r"aten::mul on compute reads .* after receive on side"):
        device.check()
    device.default.wait_stream(side)


# --- several ranks ----------------------------------------------------------------------------------------------------
