"""Ranks as processes: messages over Gloo, each a kernel on its channel's stream on both sides."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.pool import Pool

pytestmark = pytest.mark.dist


def layer() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(4, 4)


def forward_and_backward(rank: int, waits: bool) -> tuple[list[float], str]:
    """Gradients of the second of two layers, or of the first; and the race that was found."""
    from support.sim_device import RaceError, SimDevice, receive_into, sent_from

    device = SimDevice(f"rank {rank}")
    out, into = device.stream(f"{rank}→{1 - rank}"), device.stream(f"{1 - rank}→{rank}")

    def send(tensor: torch.Tensor) -> None:
        out.wait_stream(device.default)
        dist.send(sent_from(tensor, "send", out), 1 - rank)  # type: ignore[arg-type]
        device.default.wait_stream(out)

    def receive() -> torch.Tensor:
        buffer = torch.empty(2, 4, device="sim")
        into.wait_stream(device.default)
        values = torch.empty(2, 4)
        dist.recv(values, 1 - rank)
        receive_into(buffer, values, "receive", into)  # type: ignore[arg-type]
        if waits:
            device.default.wait_stream(into)
        return buffer

    race = ""
    with device.active():
        stage = layer().to("sim")
        torch.ones(1, device="sim")
        if rank == 0:
            made = stage(torch.ones(2, 4).to("sim"))
            send(made.detach())
            made.backward(receive())
        else:
            given = receive().requires_grad_()
            try:
                stage(given).sum().backward()
            except RaceError as error:
                race = str(error)
                device.default.wait_stream(into)
                stage(given).sum().backward()
            assert given.grad is not None
            send(given.grad)
        try:
            device.check()
        except RaceError as error:
            race = str(error)
        device.synchronize()
        assert stage.weight.grad is not None
        return stage.weight.grad.flatten().tolist(), race


def test_two_processes(pool: Pool) -> None:
    first, second = layer(), layer()
    second(first(torch.ones(2, 4))).sum().backward()
    for waits in (True, False):
        results = pool.run(2, forward_and_backward, waits)
        for stage, (gradient, race) in zip((first, second), results, strict=True):
            assert stage.weight.grad is not None
            assert gradient == stage.weight.grad.flatten().tolist()
            assert (race == "") is waits
        if not waits:
            assert "but no event orders it after receive on 0→1" in results[1][1]
            assert "but no event orders it after receive on 1→0" in results[0][1]
