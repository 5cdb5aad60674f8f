"""A simulated device `sim`: exact values at once, and each access checked against the order of streams.

    device = SimDevice()
    channel = device.stream("0→1")
    with device.active():                       # torch.empty(…, device="sim") makes tensors on it
        x = torch.ones(4, device="sim")
        with device.use(channel):
            x.mul_(2)                           # RaceError: no event orders it after the fill of x on compute

Each simulated rank has a `SimDevice` of its own: a message is a kernel on its channel's stream on both sides, and its
values travel by Gloo. From the import on `sim` is the accelerator of the process, which changes nothing for tensors on
the CPU.

What it does not see: a host that reads a copy with `non_blocking=True` too early. Where it is too strict: a block is
one piece, so kernels on disjoint views of it need an order too. Errors in a backward are raised after it.
"""

from support.sim_device.device import (
    Block,
    Event,
    FreedTooEarlyError,
    HostSync,
    RaceError,
    SimDevice,
    Stream,
    current_device,
)
from support.sim_device.tensors import MixedDevicesError, SimTensor

__all__ = [
    "Block",
    "Event",
    "FreedTooEarlyError",
    "HostSync",
    "MixedDevicesError",
    "RaceError",
    "SimDevice",
    "SimTensor",
    "Stream",
    "current_device",
]
