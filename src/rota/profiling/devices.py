"""Devices: what makers' data sheets say of those with a name, what this machine has, and how busy others keep it.

Data sheets' figures are dense peaks (no sparsity), with the matrix units where the dtype uses them by default, and the
bandwidth of the device's own memory.

The two efficiencies are estimates, not data: large matrix multiplications reach about 60 to 75% of the peak on these
devices, and element-wise kernels about 80% of the bandwidth. This is good enough to choose between cuts and schedules;
measure on the device itself if you can.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple, final

import torch
import torch.distributed as dist

from rota.core.errors import EstimateError, UsageError
from rota.models import Stages
from rota.runtime.device.local import property_of
from rota.runtime.environment import shared_cores
from rota.runtime.host_memory import total_bytes

_STAT = Path("/proc/stat")
_LEAST_S = 0.5  # without which missing cores are not judged: the system counts in ticks of 10 ms
_BUSY = (0, 1, 2, 5, 6, 7)  # of a line of /proc/stat: user, nice, system, irq, softirq, steal


@final
@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One kind of device.

    Attributes:
        name: Its name for `device=` and `--device`.
        flops_per_s: Peak operations per second by dtype, with `tf32` for float32 that may be rounded, and `float8` for
            all formats of 8 bits.
        bytes_per_s: Bandwidth of its memory.
        memory_bytes: Size of its memory; None: no figure.
        is_gpu: Whether it runs kernels, such as fused attention, that only GPUs have.
        compute_efficiency: Fraction of the peak that operations reach.
        memory_efficiency: Fraction of the bandwidth that operations reach.
        least_op_us: The time to start a kernel, a lower bound for every operation.
        num_multiprocessors: SMs of NVIDIA's devices, compute units of AMD's; None: not a GPU.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: int | None = None
    is_gpu: bool = True
    compute_efficiency: float = 0.65
    memory_efficiency: float = 0.8
    least_op_us: float = 4.0
    num_multiprocessors: int | None = None

    def op_us(self, num_flops: int, num_bytes: int, dtype: torch.dtype) -> float:
        """The roofline in µs: the longest of the times to compute, to move bytes, and to start a kernel."""
        compute_us = 1e6 * num_flops / (self._rate(dtype) * self.compute_efficiency)
        return max(compute_us, 1e6 * num_bytes / (self.bytes_per_s * self.memory_efficiency), self.least_op_us)

    def _rate(self, dtype: torch.dtype) -> float:
        name = str(dtype.to_real() if dtype.is_complex else dtype).removeprefix("torch.")
        if name == "float32" and torch.get_float32_matmul_precision() != "highest":
            name = "tf32"
        elif name.startswith("float8"):
            name = "float8" if "float8" in self.flops_per_s else "bfloat16"
        return self.flops_per_s.get(name, self.flops_per_s["float32"])


class _Gpu(NamedTuple):
    """A data sheet: peaks in 10^12 operations per second, bandwidth in 10^9 bytes per second, memory in 10^9 bytes."""

    name: str
    half: float
    tf32: float
    single: float
    double: float
    int8: float
    float8: float | None
    gb_s: float
    gb: int
    num_multiprocessors: int

    def model(self) -> DeviceModel:
        peaks = {"float16": self.half, "bfloat16": self.half, "tf32": self.tf32, "float32": self.single}
        peaks |= {"float64": self.double, "int8": self.int8} | ({"float8": self.float8} if self.float8 else {})
        rates = {dtype: peak * 1e12 for dtype, peak in peaks.items()}
        sizes = self.gb_s * 1e9, self.gb * 10**9
        return DeviceModel(self.name, rates, *sizes, num_multiprocessors=self.num_multiprocessors)


# fmt: off
_GPUS = (
    #    name          half  tf32 single double int8 float8  GB/s   GB  SMs
    # NVIDIA A100 (SXM4) data sheet; float64 on its tensor cores.
    _Gpu("a100-40gb",   312,  156,  19.5,  19.5,  624, None, 1555,  40, 108),
    _Gpu("a100-80gb",   312,  156,  19.5,  19.5,  624, None, 2039,  80, 108),
    # NVIDIA H100 (SXM5, PCIe) and H200 data sheets, half of the peaks with sparsity.
    _Gpu("h100",        989,  494,    67,    67, 1979, 1979, 3350,  80, 132),
    _Gpu("h100-pcie",   756,  378,    51,    51, 1513, 1513, 2000,  80, 114),
    _Gpu("h200",        989,  494,    67,    67, 1979, 1979, 4800, 141, 132),
    # AMD Instinct MI300X data sheet; matrix cores.
    _Gpu("mi300x",     1307,  653,   163,   163, 2615, 2615, 5300, 192, 304),
    # NVIDIA's Ada architecture white paper: with float32 accumulation.
    _Gpu("rtx-4090",    165, 82.6,  82.6,   1.3,  661,  330, 1008,  24, 128),
    # NVIDIA L40S data sheet.
    _Gpu("l40s",        362,  183,  91.6,   1.4,  733,  733,  864,  48, 142),
)
# fmt: on
# One core of a server at 3 GHz: two fused multiply-adds per cycle on 8 floats (AVX2), part of the bandwidth.
_CPU_CORE = DeviceModel("cpu-core", {"float32": 96e9, "float64": 48e9}, 12e9, is_gpu=False, least_op_us=2.0)

#: The known devices, by name for `device=` and `--device`.
DEVICES = {device.name: device for device in (*(gpu.model() for gpu in _GPUS), _CPU_CORE)}


def device_named(name: str) -> DeviceModel:
    """The device of this name. Raises EstimateError that lists the known names."""
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    longer = [known for known in DEVICES if known.startswith(f"{name.lower()}-")]
    near = longer or get_close_matches(name.lower(), DEVICES, 1)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise EstimateError(
        f"times cannot be estimated for device {name!r}; {hint}known devices are {', '.join(DEVICES)}. Leave it out "
        f"to measure where the model is"
    )


# --- this machine -----------------------------------------------------------------------------------------------------


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
        num_bytes = property_of(device, "total_memory")
    else:
        num_bytes = total_bytes()
        num_bytes = num_bytes and num_bytes // ranks_per_machine
    if num_bytes is None:
        raise UsageError(f"the memory of {name or 'this machine'} is unknown; give the limit in GB")
    return num_bytes


def device_name(device: torch.device) -> str:
    """What the maker calls an accelerator; its type where PyTorch does not know."""
    return str(property_of(device, "name") or device.type)


def cpu_name() -> str:
    """What the maker calls this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def why_not_here(num_processes: int) -> str:
    """Why so many processes cannot be measured on this machine; "" if they can."""
    in_a_group = "this process is one of a process group, and cannot be forked" if dist.is_initialized() else ""
    return shared_cores(num_processes) or in_a_group


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
