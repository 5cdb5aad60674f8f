"""Accesses that no event orders are found, and those that one orders are not; so is memory that is freed too early."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from support.sim_device import (
    FreedTooEarlyError,
    MixedDevicesError,
    RaceError,
    SimDevice,
    SimTensor,
    receive_into,
    sent_from,
)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="sim")


# --- races ------------------------------------------------------------------------------------------------------------


def test_a_read_that_no_event_orders(device: SimDevice) -> None:
    x = ones(4)
    expected = "aten::mul on side reads aten::empty's [4], but no event orders it after aten::fill_ on compute"
    with device.use(device.stream("side")), pytest.raises(RaceError, match=re.escape(expected)):
        x * 2


def test_an_event_orders_it(device: SimDevice) -> None:
    x, side = ones(4), device.stream("side")
    side.wait_event(device.current_stream.record_event())
    with device.use(side):
        y = x * 2
    with pytest.raises(RaceError, match="aten::add on compute reads aten::mul's"):
        y + 1
    device.default.wait_stream(side)
    assert (y + 1).tolist() == [3] * 4


def test_an_event_covers_only_what_came_before_it(device: SimDevice) -> None:
    x, side = ones(4), device.stream("side")
    event = device.current_stream.record_event()
    x.add_(1)
    side.wait_event(event)
    with device.use(side), pytest.raises(RaceError, match="no event orders it after aten::add_ on compute"):
        x * 2


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_that_another_stream_may_still_read_is_freed_too_early(device: SimDevice) -> None:
    x, side = ones(4), device.stream("0→1")
    side.wait_stream(device.default)
    sent_from(x, "send 0F0→1F0", side)
    del x
    expected = r"aten::empty's \[4\] was freed, and compute may reuse it, while send 0F0→1F0 on 0→1 may still use it"
    with pytest.raises(FreedTooEarlyError, match=expected):
        ones(1)


@pytest.mark.parametrize("how", ["event", "host", "query", "record_stream"])
def test_memory_may_be_freed_when_the_other_stream_is_done(how: str) -> None:
    device = SimDevice(is_fast=how == "query")
    with device.active():
        x, side = ones(4), device.stream("0→1")
        assert isinstance(x, SimTensor)
        side.wait_stream(device.default)
        sent_from(x, "send", side)
        if how == "event":
            device.default.wait_stream(side)
        elif how == "host":
            side.synchronize()
        elif how == "query":
            assert side.record_event().query()
        else:
            x.record_stream(side)
        del x
        ones(1)


def test_bytes_are_counted(device: SimDevice) -> None:
    x = ones(1000)
    assert device.allocated_bytes == 4000
    y = x * 2
    assert (device.allocated_bytes, device.peak_bytes) == (8000, 8000)
    del x
    z = y.view(10, 100)
    assert (device.allocated_bytes, device.peak_bytes) == (4000, 8000)
    del y, z
    assert device.allocated_bytes == 0


# --- devices and the host ---------------------------------------------------------------------------------------------


def test_mixed_devices_are_refused(device: SimDevice) -> None:
    x, other = ones(4), SimDevice("other")
    with pytest.raises(MixedDevicesError, match=r"aten::add got a tensor of shape \[4\] on cpu, others on sim"):
        x + torch.ones(4)
    with other.active():
        y = ones(4)
    with pytest.raises(MixedDevicesError, match="aten::add got tensors of sim and other"):
        x + y
    assert (x + torch.tensor(2.0)).tolist() == [3] * 4  # a number may be on the CPU


def syncs_of(device: SimDevice, work: object) -> list[str]:
    before = len(device.syncs)
    work()  # type: ignore[operator]
    return [sync.operation.removeprefix("aten::") for sync in device.syncs[before:]]


def test_waits_of_the_host_are_counted(device: SimDevice) -> None:
    x, host = ones(4), torch.ones(4)
    assert syncs_of(device, lambda: x.sum().item()) == ["_local_scalar_dense"]
    assert syncs_of(device, lambda: bool(x.sum() > 1)) == ["_local_scalar_dense"]
    assert syncs_of(device, lambda: float(x[0])) == ["_local_scalar_dense"]
    assert syncs_of(device, lambda: x.cpu()) == ["_to_copy"]
    assert syncs_of(device, lambda: x.to("cpu")) == ["_to_copy"]
    assert syncs_of(device, lambda: torch.equal(x, x)) == ["equal"]
    assert syncs_of(device, lambda: x.nonzero()) == ["nonzero"]
    assert syncs_of(device, lambda: x[x > 0]) == ["index"]
    assert syncs_of(device, lambda: x.masked_select(x > 0)) == ["masked_select"]
    assert syncs_of(device, lambda: torch.is_nonzero(x.sum())) == ["_local_scalar_dense"]
    assert syncs_of(device, lambda: host.to("sim")) == ["copy_"]
    assert syncs_of(device, lambda: host.copy_(x)) == ["copy_"]
    assert syncs_of(device, lambda: torch.tensor([1.0, 2.0], device="sim")) == ["copy_"]
    assert syncs_of(device, device.synchronize) == ["synchronize"]


def test_what_needs_no_wait_counts_none(device: SimDevice) -> None:
    x, host = ones(4), torch.ones(4)

    def work() -> None:
        y = (x * 2 + 1).view(2, 2).t().contiguous().float().half().sum()
        torch.where(x > 0, x, 0)
        x.clamp_(min=0).copy_(x * 2)
        y.isfinite().logical_not()
        host.to("sim", non_blocking=True)
        torch.zeros(3, device="sim").masked_fill_(torch.zeros(3, device="sim").bool(), 1)

    assert syncs_of(device, work) == []


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: SimDevice) -> None:
    plain = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 11))
    model, x, target = copy.deepcopy(plain).to("sim"), torch.rand(3, 8), torch.arange(3)
    with torch.autocast("sim", dtype=dtype):
        hidden = model[0](x.to("sim"))
        normal = model[1](hidden)
        loss = nn.functional.cross_entropy(model[2](normal), target.to("sim"))
    assert (hidden.dtype, normal.dtype, loss.dtype) == (dtype, torch.float32, torch.float32)
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert abs(loss.item() - nn.functional.cross_entropy(plain(x), target).item()) < 0.02
