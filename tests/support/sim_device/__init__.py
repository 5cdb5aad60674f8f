"""A simulated device `sim`: exact values at once, and each access checked against the order of streams.

    device = SimDevice()
    channel = device.stream("0→1")
    with device.active():                       # torch.empty(…, device="sim") makes tensors on it
        x = torch.ones(4, device="sim")
        with device.use(channel):
            x.mul_(2)                           # RaceError: no event orders it after the fill of x on compute

Each simulated rank has a `SimDevice` of its own: ranks may be threads of one process or processes. A process that has
imported this room has `sim` as its accelerator until it ends, so tests import it in processes of their own.
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
from support.sim_device.tensors import MixedDevicesError, SimTensor, receive_into, sent_from

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
    "receive_into",
    "sent_from",
]
