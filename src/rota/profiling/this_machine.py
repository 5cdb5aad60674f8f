"""What a profile was made on: this machine's CPU or accelerators, by name, and how busy other programs keep it."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path
from typing import final

import torch

from rota.core.errors import UsageError
from rota.models import Stages
from rota.profiling.devices import device_named
from rota.runtime.host_memory import total_bytes

_STAT = Path("/proc/stat")
_LEAST_S = 0.5  # without which missing cores are not judged: the system counts in ticks of 10 ms
_BUSY = (0, 1, 2, 5, 6, 7)  # of a line of /proc/stat: user, nice, system, irq, softirq, steal


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
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if kind not in ("cpu", "" if accelerator is None else accelerator.type):
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
        num_bytes = device_named(name).memory_bytes
    elif name is not None and (device := torch.device(name)).type != "cpu":
        properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
        num_bytes = getattr(properties, "total_memory", None)
    else:
        num_bytes = total_bytes()
        num_bytes = num_bytes and num_bytes // ranks_per_machine
    if num_bytes is None:
        raise UsageError(f"the memory of {name or 'this machine'} is unknown; give the limit in GB")
    return num_bytes


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


# --- other programs ---------------------------------------------------------------------------------------------------


@final
class OtherPrograms:
    """Counts, from when it is made, what is neither this process's nor its children's that have ended."""

    def __init__(self) -> None:
        self._began_s, self._others_s = time.monotonic(), _others_s()

    def num_cores(self) -> float:
        """How many cores they used on average since then; 0.0 where the system does not tell."""
        elapsed_s = time.monotonic() - self._began_s
        return max(0.0, _others_s() - self._others_s) / elapsed_s if elapsed_s else 0.0

    def missing_cores(self, num_processes: int) -> float:
        """How many cores they took from `num_processes` processes of one thread; 0.0 for less than half a second."""
        if time.monotonic() - self._began_s < _LEAST_S:
            return 0.0
        return max(0.0, self.num_cores() + num_processes - (os.cpu_count() or 1))


def _others_s() -> float:
    """CPU seconds that other programs have used since the machine started."""
    if not _STAT.exists():
        return 0.0
    fields = _STAT.read_text().split("\n", 1)[0].split()[1:]
    busy_s = sum(int(fields[i]) for i in _BUSY) / os.sysconf("SC_CLK_TCK")
    of_ours = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return busy_s - sum(usage.ru_utime + usage.ru_stime for usage in of_ours)
