"""What a profile was made on, by name: this machine's CPU, or accelerators."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from rota.core.errors import UsageError
from rota.models import Stages
from rota.profiling.devices import device_named
from rota.runtime.host_memory import total_bytes


def place_name(stages: Stages) -> str:
    """The devices of the stages' parameters, such as "NVIDIA H200"; the CPU if they are on no other."""
    devices = accelerators_of(stages)
    return " and ".join(dict.fromkeys(map(device_name, devices))) if devices else f"{cpu_name()}, 1 thread"


def accelerators_of(stages: Stages) -> list[torch.device]:
    """The devices of the stages' parameters, without the CPU, in the order of the stages."""
    devices = dict.fromkeys(parameter.device for module in stages.modules for parameter in module.parameters())
    return [device for device in devices if device.type not in ("cpu", "meta")]


def is_here(name: str) -> bool:
    """Whether `name` is one of PyTorch's devices, such as "cpu" or "cuda:1".

    Raises UsageError if this machine does not have it.
    """
    try:
        kind = torch.device(name).type
    except RuntimeError:  # such as "h100"
        return False
    there = torch.accelerator.current_accelerator(check_available=True)
    if kind not in ("cpu", "" if there is None else there.type):
        raise UsageError(
            f"device {name!r}: PyTorch finds none on this machine; give cpu, or one to estimate for, such as h100"
        )
    return True


def memory_bytes_per_rank(name: str | None, ranks_per_machine: int) -> int:
    """The memory of one rank's device.

    Args:
        name: A device on this machine, such as "cuda", or one to estimate for, such as "h100"; None: the CPU.
        ranks_per_machine: Ranks that share a machine's memory, where they run on its CPU.

    Returns:
        All of an accelerator's memory; of this machine's main memory an equal part.

    Raises:
        UsageError: The device or the size of its memory is unknown.
    """
    if name is not None and not is_here(name):
        found = device_named(name).memory_bytes
    elif name is not None and (device := torch.device(name)).type != "cpu":
        properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
        found = getattr(properties, "total_memory", None)
    else:
        found = total_bytes()
        found = found and found // ranks_per_machine
    if found is None:
        raise UsageError(f"the memory of {name or 'this machine'} is unknown; give the limit in GB")
    return found


def device_name(device: torch.device) -> str:
    """What the maker calls an accelerator; its type where PyTorch does not know."""
    name = getattr(torch.get_device_module(device), "get_device_name", lambda _: device.type)
    return str(name(device))


def cpu_name() -> str:
    """What the maker calls this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
