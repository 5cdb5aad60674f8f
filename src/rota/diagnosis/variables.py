"""Environment variables that change what NCCL, CUDA and PyTorch do: which are set, and which are known to hurt.

What NCCL's documentation (user guide, "Environment Variables") lists as debugging is for debugging: it "may result in
sub-optimal behavior, crashes, or hangs" where it stays set. PyTorch's are in its page "ProcessGroupNCCL Environment
Variables", CUDA's in the CUDA C++ programming guide, "CUDA Environment Variables".
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from rota.diagnosis.report import Section
from rota.errors import FormatError
from rota.reading import open_file

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "RCCL_", "CCL_", "GLOO_", "TORCH_DISTRIBUTED_")
_NAMES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"),
    *("CUDA_MODULE_LOADING", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("GPU_MAX_HW_QUEUES", "AMD_SERIALIZE_KERNEL", "HIP_LAUNCH_BLOCKING"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "OMP_NUM_THREADS"),
)
_MOST_BYTES = 100_000  # of a configuration file


class _Harm(NamedTuple):
    """When a variable's value hurts, and why; the remedy is to unset it unless another is given."""

    hurts: Callable[[str], bool]
    why: str
    remedy: str = ""


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off", "n", "f")


def _off(value: str) -> bool:
    return value.strip().lower() in ("0", "false", "no", "off", "n", "f")


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().upper() in values


def _any(_: str) -> bool:
    return True


_SERIAL = "the host waits for each kernel, so that nothing overlaps"
_HARMS: Mapping[str, _Harm] = {
    "NCCL_P2P_DISABLE": _Harm(_on, "messages go through host memory instead of NVLink or PCIe"),
    "NCCL_P2P_LEVEL": _Harm(_is("LOC", "0"), "messages go through host memory instead of NVLink or PCIe"),
    "NCCL_SHM_DISABLE": _Harm(_on, "pairs without peer access talk through the network"),
    "NCCL_IB_DISABLE": _Harm(_on, "nodes talk over TCP instead of InfiniBand or RoCE"),
    "NCCL_NET_GDR_LEVEL": _Harm(_is("LOC", "0"), "messages to other nodes are copied through host memory"),
    "NCCL_LAUNCH_MODE": _Harm(_any, "it is for debugging, and changes how kernels are launched"),
    "NCCL_CHECKS_DISABLE": _Harm(_on, "wrong arguments are not noticed"),
    "NCCL_ALGO": _Harm(_any, "NCCL may not choose the fastest algorithm, or fail where yours does not exist"),
    "NCCL_PROTO": _Harm(_any, "NCCL may not choose the fastest protocol; LL128 corrupts data where links reorder"),
    "NCCL_DEBUG": _Harm(_is("INFO", "TRACE"), "it logs to standard output, and slows the run down", "set it to WARN"),
    "NCCL_DMABUF_ENABLE": _Harm(_off, "messages to other nodes may be copied through host memory"),
    "NCCL_BLOCKING_WAIT": _Harm(_on, _SERIAL),
    "TORCH_NCCL_BLOCKING_WAIT": _Harm(_on, "the host waits for each message, so that nothing overlaps"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _Harm(_off, "a failure of NCCL ends no rank, and the others wait for it"),
    "TORCH_NCCL_ENABLE_MONITORING": _Harm(_off, "a rank that is stuck in a call of CUDA is not ended by PyTorch"),
    "TORCH_NCCL_NAN_CHECK": _Harm(_on, "each message is read once more, to look for nan"),
    "TORCH_NCCL_DESYNC_DEBUG": _Harm(_on, "every collective is recorded in the store"),
    "TORCH_DISTRIBUTED_DEBUG": _Harm(_is("DETAIL"), "all ranks compare every collective before it runs"),
    "CUDA_LAUNCH_BLOCKING": _Harm(_on, _SERIAL),
    "HIP_LAUNCH_BLOCKING": _Harm(_on, _SERIAL),
    "AMD_SERIALIZE_KERNEL": _Harm(_on, _SERIAL),
    "CUDA_DEVICE_MAX_CONNECTIONS": _Harm(
        _is("1"),
        "kernels start in the order of their launch: plans cannot hang, but messages overlap less with compute",
        "unset it, unless tensor parallelism in your stages needs it",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _Harm(_on, "each allocation waits for the device"),
    "NCCL_SOCKET_IFNAME": _Harm(_is("LO", "=LO"), "other nodes cannot be reached"),
}


def set_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of these libraries that are set, by name; those of NCCL's configuration files too, where not."""
    found = {name: value for name, value in environment.items() if name in _NAMES or name.startswith(_PREFIXES)}
    for path in _configuration_files(environment):
        for name, value in _settings(path):
            found.setdefault(name, value)
    return dict(sorted(found.items()))


def judge(variables: Mapping[str, str], on_accelerators: bool) -> Section:
    """Which of the variables hurt. Without accelerators those of NCCL and CUDA change nothing."""
    section = Section("environment variables")
    for name, value in variables.items():
        text = f"{name}={value}"
        harm = _HARMS.get(name)
        if harm is not None and harm.hurts(value):
            if on_accelerators or name.startswith("TORCH_DISTRIBUTED_"):
                section.warning(name, f"{text}: {harm.why}", harm.remedy or f"unset {name}, if nothing here needs it")
            else:
                section.ok(name, f"{text}; on accelerators {harm.why}")
        elif name == "GLOO_SOCKET_IFNAME":
            section.ok(name, f"{text}; `rota run` sets it to the loopback interface for its own ranks")
        elif name == "OMP_NUM_THREADS":
            section.ok(name, f"{text}; `rota run` sets it to 1 for its ranks")
        else:
            section.ok(name, text)
    if not variables:
        section.ok("NCCL, CUDA, PyTorch", "none of their variables is set")
    return section


def _configuration_files(environment: Mapping[str, str]) -> Iterable[Path]:
    """The files that NCCL reads besides: its user file first, whose settings hide those of the system's file."""
    own = environment.get("NCCL_CONF_FILE")
    yield Path(own) if own else Path.home() / ".nccl.conf"
    yield Path("/etc/nccl.conf")


def _settings(path: Path) -> list[tuple[str, str]]:
    """The variables that such a file sets."""
    try:
        with open_file(path) as file:
            lines = file.read(_MOST_BYTES).decode(errors="replace").splitlines()
    except (OSError, ValueError, FormatError):
        return []
    matches = (re.fullmatch(r"\s*(NCCL_\w+)\s*=(.*)", line) for line in lines)
    return [(match[1], match[2].strip()) for match in matches if match]
