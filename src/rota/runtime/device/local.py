"""Which device belongs to this process: the only one that it sees, that of its number on its machine, or the CPU."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from rota.core.errors import PipelineError, UsageError
from rota.core.text import count_text
from rota.runtime.device.known import KNOWN
from rota.runtime.environment import DEVICE, STORE, processes_here, say

AUTO, CPU = "auto", "cpu"


def local_device() -> torch.device:
    """The device for this process's stages, as `rota run --device` says; it becomes PyTorch's current one.

    By default it is the accelerator with this process's number on its machine, LOCAL_RANK, or number 0 where the
    launcher shows each process one of its own (by CUDA_VISIBLE_DEVICES or the like, as Slurm's --gpus-per-task=1 does).
    It is the CPU where there is no accelerator, or fewer than processes (LOCAL_WORLD_SIZE), which the machine's first
    process reports.

    Returns:
        The device, such as `device(type="cuda", index=1)`, or the CPU.

    Raises:
        PipelineError: `rota run --device` names a device that is not there, or there are too few.
    """
    kind, number = local_device_type(), int(os.environ.get("LOCAL_RANK", 0))
    if kind == CPU:
        if os.environ.get(DEVICE, AUTO) == AUTO and number == 0:
            _report_too_few(processes_here())
        return torch.device(CPU)
    if _sees_its_own():
        number = 0
    elif int(os.environ.get("WORLD_SIZE", 1)) > 1 and "LOCAL_RANK" not in os.environ:
        raise PipelineError(
            "LOCAL_RANK is not set, so it is not known which device is this process's; set LOCAL_RANK and "
            "LOCAL_WORLD_SIZE (under Slurm from SLURM_LOCALID and SLURM_NTASKS_PER_NODE), or start with `rota run`"
        )
    device = torch.device(kind, number)
    torch.accelerator.set_device_index(device)
    return device


def device_type(wish: str, num_processes: int) -> str:
    """The type of device that this many processes of a machine take. `wish`: "auto", "cpu", or an accelerator's type.

    Raises UsageError if this machine does not have what `wish` names, or not enough of it.
    """
    kind, number = _accelerators()
    if wish in (AUTO, CPU):
        return kind if wish == AUTO and number >= num_processes else CPU
    if kind == CPU:
        raise UsageError(f"device {wish!r}: PyTorch finds no accelerator on this machine; give auto or cpu")
    if kind != wish:
        raise UsageError(
            f"device {wish!r}: this machine has {count_text(number, f'{kind} device')}; give {kind}, auto or cpu "
            "(each process takes the one of its number)"
        )
    if number < num_processes:
        raise UsageError(
            f"device {wish!r}: {count_text(num_processes, 'process', 'es')} on this machine, but "
            f"{count_text(number, f'{kind} device')}; start {number} here, or run on the CPU (cpu)"
        )
    return kind


def current_device(kind: str) -> torch.device:
    """This process's device of a type: the one that `local_device` or the caller has made PyTorch's current one."""
    return torch.device(CPU) if kind == CPU else torch.device(kind, torch.accelerator.current_device_index())


def property_of(device: torch.device, name: str) -> Any:
    """A property of an accelerator that only some types have, such as its name or uuid; None where PyTorch has none."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
    return getattr(properties, name, None)


def group_backend() -> str:
    """The backend of a process group whose tensors may be on the CPU or on an accelerator, as `new_group` takes it.

    It is known before the tensors are. The communicator of an accelerator is made when the first one comes.
    """
    kind = local_device_type()
    return "gloo" if kind == CPU else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def backends_of(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The types of device whose tensors a group takes (the default one if None), and the backend of each."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))  # "cpu:gloo,cuda:nccl"


def local_device_type() -> str:
    """The type of `local_device`, without making it the current one."""
    return device_type(os.environ.get(DEVICE, AUTO), 1 if _sees_its_own() else processes_here())


def _sees_its_own() -> bool:
    """Whether the launcher shows this process a device of its own; the ranks of `rota run` share what they see."""
    kind, number = _accelerators()
    is_chosen = kind in KNOWN and any(map(os.environ.get, KNOWN[kind].visible))
    return number == 1 and is_chosen and STORE not in os.environ


def _accelerators() -> tuple[str, int]:
    """Their type and number; ("cpu", 0) if there are none that have messages of their own, which Apple's lack."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.Backend.default_device_backend_map.get(accelerator.type, "gloo") == "gloo":
        return CPU, 0
    return accelerator.type, torch.accelerator.device_count()


@cache
def _report_too_few(num_processes: int) -> None:
    kind, number = _accelerators()
    if number:
        say(
            f"{count_text(num_processes, 'process', 'es')} on this machine, but "
            f"{count_text(number, f'{kind} device')}, so rota.local_device() is the CPU; start {number} here to use "
            f"{'it' if number == 1 else 'them'}"
        )
