"""A simulated device `sim`: exact values at once, and each access checked against the order of streams.

    with SimDevice().active():                  # torch.empty(…, device="sim") makes tensors on it
        x = torch.ones(4, device="sim")
        with torch.Stream("sim"):
            x.mul_(2)                           # RaceError: no event orders it after fill_ on the default stream

Streams, events, pinned memory and `torch.accelerator` are PyTorch's own, see `device_guard.cpp`. Each simulated rank
has a `SimDevice` of its own: a message is a kernel on its channel's stream on both sides, and its values travel by
Gloo. From the import on `sim` is the accelerator of the process, which changes nothing for tensors on the CPU.

What it does not see: a host that writes to pinned memory which a copy to the device still reads. Where it is too
strict: a block is one piece, so kernels on disjoint views of it need an order too.
"""

from support.sim_device.device import (
    Block,
    FreedTooEarlyError,
    HostSync,
    RaceError,
    SimDevice,
    current_device,
)
from support.sim_device.tensors import MixedDevicesError, SimTensor

__all__ = [
    "Block",
    "FreedTooEarlyError",
    "HostSync",
    "MixedDevicesError",
    "RaceError",
    "SimDevice",
    "SimTensor",
    "current_device",
]
