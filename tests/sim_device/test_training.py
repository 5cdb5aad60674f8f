"""Training on the simulated device: the values of the CPU, bit for bit, without races and without waits of the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rota.torch_internals import run_backward
from support.sim_device import RaceError, SimDevice, receive_into, sent_from


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


def test_modules_move_and_change_their_type(device: SimDevice) -> None:
    model = network().to("sim")
    weight = model[1].weight
    assert weight.device.type == "sim"
    model.double()
    assert model[1].weight is weight
    assert weight.dtype == torch.float64
    assert loss_of(model, batch().to("sim")).dtype == torch.float64
    model.to("cpu", torch.float32)
    assert_same(network(), model)


def test_dropout_draws_from_the_device(device: SimDevice) -> None:
    """Seeded alike, it draws what the CPU draws, and leaves the CPU's random state as it was."""
    here, there = network(0.5).to("sim"), network(0.5)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loss_of(here, batch().to("sim")).backward()
    assert torch.equal(torch.get_rng_state(), before)
    loss_of(there, batch()).backward()
    assert_same(here, there)


def test_recomputed_blocks(device: SimDevice) -> None:
    here, there = network(0.3).to("sim"), network(0.3)
    for model, tokens in ((here, batch().to("sim")), (there, batch())):
        torch.manual_seed(3)
        x = model[0](tokens)
        x = checkpoint(model[1:], x, use_reentrant=False)
        nn.functional.cross_entropy(x.flatten(0, 1), tokens.flatten()).backward()
    assert_same(here, there)


def test_inplace_and_views_in_autograd(device: SimDevice) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0].mul_(3)
        y.t().add_(1)
        return (y.view(-1)[::2] ** 2).sum()

    x, host = torch.ones(3, 4, device="sim", requires_grad=True), torch.ones(3, 4, requires_grad=True)
    run(x).backward()
    run(host).backward()
    assert x.grad is not None
    assert host.grad is not None
    assert torch.equal(x.grad.cpu(), host.grad)


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


def test_grad_scaler_skips_a_step_that_overflows(device: SimDevice) -> None:
    model = network().to("sim")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("sim", init_scale=2.0**10)
    tokens, before = batch().to("sim"), network()
    loss = loss_of(model, tokens)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert torch.allclose(model[1].weight.grad.cpu(), grad_of(before)[1].weight.grad, atol=1e-6)
    model[1].weight.grad[0, 0] = float("inf")
    optimizer.zero_grad(set_to_none=False)
    scaler = torch.amp.GradScaler("sim", init_scale=2.0**10)
    scaler.scale(loss_of(model, tokens) * float("inf")).backward()
    syncs = len(device.syncs)
    scaler.step(optimizer)
    assert [sync.operation for sync in device.syncs[syncs:]] == ["aten::_local_scalar_dense"]  # as on CUDA
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert torch.equal(model[1].weight.detach().cpu(), before[1].weight.detach())


def grad_of(model: nn.Sequential) -> nn.Sequential:
    loss_of(model, batch()).backward()
    return model


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


@pytest.mark.parametrize("threads", [True, False])
def test_a_backward_in_one_thread(threads: bool, device: SimDevice) -> None:
    """As a split backward runs it."""
    here, there = network().to("sim"), network()
    with torch.autograd.set_multithreading_enabled(threads):
        loss = loss_of(here, batch().to("sim"))
        run_backward([loss], [torch.ones_like(loss)])
    loss_of(there, batch()).backward()
    assert_same(here, there)


# --- several ranks ----------------------------------------------------------------------------------------------------


def test_ranks_in_threads_are_apart_from_each_other() -> None:
    """Two stages on two devices, forward and backward, at the same time: clocks and values are each rank's own."""
    errors: list[BaseException] = []
    mail: list[list[torch.Tensor]] = [[], []]
    arrived = [threading.Semaphore(0), threading.Semaphore(0)]
    stages = [network()[:3], network()[3:]]
    whole = network()

    def send(tensor: torch.Tensor, rank: int, device: SimDevice) -> None:
        channel = device.stream("out")
        channel.wait_stream(device.default)
        mail[1 - rank].append(sent_from(tensor, "send", channel))  # type: ignore[arg-type]
        arrived[1 - rank].release()
        device.default.wait_stream(channel)

    def receive(shape: tuple[int, ...], rank: int, device: SimDevice) -> torch.Tensor:
        channel = device.stream("in")
        buffer = torch.empty(shape, device="sim")
        channel.wait_stream(device.default)
        arrived[rank].acquire(timeout=100)
        receive_into(buffer, mail[rank].pop(0), "receive", channel)  # type: ignore[arg-type]
        device.default.wait_stream(channel)
        return buffer

    def run(rank: int) -> None:
        try:
            device = SimDevice(f"rank {rank}")
            with device.active():
                stage, tokens = stages[rank].to("sim"), batch().to("sim")
                for _ in range(5):
                    if rank == 0:
                        y = stage(tokens)
                        send(y.detach(), rank, device)
                        y.backward(receive((3, 4, 16), rank, device))
                    else:
                        x = receive((3, 4, 16), rank, device).requires_grad_()
                        nn.functional.cross_entropy(stage(x).flatten(0, 1), tokens.flatten()).backward()
                        assert x.grad is not None
                        send(x.grad, rank, device)
                device.check()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert errors == []
    for _ in range(5):
        loss_of(whole, batch()).backward()
    assert_same(nn.Sequential(*stages[0], *stages[1]), whole)
