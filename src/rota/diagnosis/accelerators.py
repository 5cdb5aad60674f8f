"""Accelerators as PyTorch sees them: names, memory, which rank gets which, and who reaches whose memory.

python -m rota.diagnosis.accelerators      prints them as JSON, for `look_apart`
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, final

import torch

from rota.diagnosis.interconnects import Interconnect, between
from rota.diagnosis.nvidia_smi import Device, Driver
from rota.diagnosis.report import Section
from rota.units import count_text, size_text

_KINDS = ("cuda", "xpu")  # PyTorch calls AMD's devices cuda, too
_MOST_USED = 0.1  # of a device's memory, by other programs
_TIMEOUT_S = 120
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@final
@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device; None: it is not told.

    Attributes:
        name: As the driver calls it.
        total_bytes: Its memory.
        free_bytes: How much of that is free.
        capability: Its compute capability, on CUDA.
        uuid: As PyTorch tells it, without "GPU-".
        error: Why it cannot be used; "" if it can.
    """

    name: str
    total_bytes: int | None
    free_bytes: int | None
    capability: tuple[int, int] | None
    uuid: str
    error: str = ""


@final
@dataclass(frozen=True, slots=True)
class Accelerators:
    """The devices by PyTorch's index, and the pairs (a, b) of which a can read the memory of b.

    `kind`: as in torch.device(kind), "cpu" if there is none; `error`: why there is none; `architectures`: for which
    PyTorch has kernels, on CUDA.
    """

    kind: str
    devices: tuple[Accelerator, ...] = ()
    peers: frozenset[tuple[int, int]] = frozenset()
    architectures: tuple[str, ...] = ()
    error: str = ""

    def to_json(self) -> str:
        """The devices as JSON text."""
        return json.dumps({**asdict(self), "peers": sorted(self.peers)})

    @classmethod
    def from_json(cls, text: str) -> Accelerators:
        """The devices in what `to_json` returned."""
        fields = json.loads(text)
        capabilities = [each.pop("capability") for each in fields["devices"]]
        devices = tuple(
            Accelerator(**each, capability=None if of is None else (of[0], of[1]))
            for each, of in zip(fields["devices"], capabilities, strict=True)
        )
        peers = frozenset((a, b) for a, b in fields["peers"])
        return cls(fields["kind"], devices, peers, tuple(fields["architectures"]), fields["error"])

    def facts(self, driver: Driver) -> list[dict[str, Any]]:
        """One JSON object per device."""
        found = []
        for index, device in enumerate(self.devices):
            of_driver = listed(device, driver)
            pcie = None if of_driver is None else [of_driver.pcie_generation, of_driver.pcie_lanes_now]
            peers = [b for a, b in sorted(self.peers) if a == index]
            found.append({"device": f"{self.kind}:{index}", **asdict(device), "peers": peers, "pcie": pcie})
        return found


def is_built_for_any() -> bool:
    """Whether this PyTorch has code for accelerators."""
    return bool(torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None))


def look_apart() -> Accelerators:
    """Ask PyTorch in another process about the accelerators of this machine.

    A driver that is broken hangs or crashes there. And no context of this process is left on devices, which would hold
    memory, and keep the ranks off devices in the compute mode Exclusive_Process.
    """
    command = [sys.executable, "-P", "-m", "rota.diagnosis.accelerators"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
        if not done.returncode:
            return Accelerators.from_json(done.stdout.strip().splitlines()[-1])
        words = done.stderr.strip().splitlines()[-1:] or [f"the process that asked ended with {done.returncode}"]
        return Accelerators("cpu", error=words[0])
    except subprocess.TimeoutExpired:
        return Accelerators("cpu", error=f"the driver did not answer within {_TIMEOUT_S} s")
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        return Accelerators("cpu", error=f"asking for devices failed: {error}")


def look() -> Accelerators:
    """Ask PyTorch about the accelerators of this machine."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kind = next((kind for kind in _KINDS if getattr(torch, kind).is_available()), None)
        number = 0 if kind is None else getattr(torch, kind).device_count()
    if kind is None or not number:
        return Accelerators("cpu", error="; ".join(str(each.message).splitlines()[0] for each in told))
    module = getattr(torch, kind)
    devices = tuple(_look_at(module, index) for index in range(number))
    pairs = [(a, b) for a in range(number) for b in range(number) if a != b]
    peers = frozenset((a, b) for a, b in pairs if _reaches(module, a, b))
    architectures = tuple(torch.cuda.get_arch_list()) if kind == "cuda" else ()
    return Accelerators(kind, devices, peers, architectures)


def _look_at(module: Any, index: int) -> Accelerator:
    try:
        properties = module.get_device_properties(index)
        free_bytes, total_bytes = module.mem_get_info(index)
    except Exception as error:  # of the driver; torch has no common type for these
        return Accelerator(f"device {index}", None, None, None, "", error=str(error).splitlines()[0])
    major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
    is_cuda = module is torch.cuda and torch.version.hip is None
    capability = (int(major), int(minor)) if is_cuda and major is not None and minor is not None else None
    return Accelerator(properties.name, total_bytes, free_bytes, capability, str(getattr(properties, "uuid", "")))


def _reaches(module: Any, one: int, other: int) -> bool:
    with suppress(Exception):  # XPU before PyTorch 2.11 has no such question, and a device that fails answers none
        return bool(module.can_device_access_peer(one, other))
    return False


def listed(device: Accelerator, driver: Driver) -> Device | None:
    """What nvidia-smi lists for a device; its numbers are not PyTorch's, but uuids are the same."""
    return next((each for each in driver.devices if device.uuid and each.uuid.endswith(device.uuid)), None)


def interconnect(accelerators: Accelerators, driver: Driver, one: int, other: int) -> Interconnect:
    """How two devices are connected."""
    a, b = accelerators.devices[one], accelerators.devices[other]
    there = [listed(each, driver) for each in (a, b)]
    if there[0] is None or there[1] is None:
        return between(None, None, None)
    way = (driver.ways or {}).get((there[0].index, there[1].index))
    generations = [each.pcie_generation for each in there if each is not None]
    lanes = [each.pcie_lanes_now for each in there if each is not None]
    known = [number for number in (*generations, *lanes) if number is not None]
    pcie = (min(known[:2]), min(known[2:])) if len(known) == 4 else None
    return between(way, a.capability if a.capability == b.capability else None, pcie)


# --- findings ---------------------------------------------------------------------------------------------------------


def judge(accelerators: Accelerators, driver: Driver, num_ranks: int, environment: Mapping[str, str]) -> Section:
    """Which rank gets which device, and what is wrong with these devices."""
    section = Section("accelerators")
    if not accelerators.devices:
        _judge_none(section, accelerators, driver, environment)
        return section
    devices = accelerators.devices
    if num_ranks > len(devices):
        remedy = f"give --ranks {len(devices)}, or fewer: two ranks on one device cannot exchange messages over NCCL"
        section.problem("ranks", f"{num_ranks} ranks for {count_text(len(devices), 'device')}", remedy)
    for index in range(len(devices)):
        _judge_device(section, accelerators, driver, index, f"rank {index}" if index < num_ranks else "no rank")
    names = sorted({device.name for device in devices[:num_ranks]})
    if len(names) > 1:
        remedy = "measure the model's layers on the slowest one, or give rota.Machine the slowdowns of the others"
        section.warning("devices", f"ranks have different ones: {', '.join(names)}", remedy)
    _judge_visible(section, len(devices), environment)
    if len(devices) > 1:
        _judge_peers(section, accelerators)
    else:
        section.skipped("peer access", "there is one device")
    return section


def _judge_none(section: Section, accelerators: Accelerators, driver: Driver, environment: Mapping[str, str]) -> None:
    hiding = [f"{name}={environment[name]}" for name in _HIDING if name in environment]
    if is_built_for_any() and hiding and not accelerators.error:
        section.warning("devices", f"PyTorch sees none, with {', '.join(hiding)}", f"unset {hiding[0].split('=')[0]}")
    elif accelerators.error or (is_built_for_any() and driver.devices):
        why = accelerators.error or f"though nvidia-smi lists {len(driver.devices)}"
        remedy = "install the driver that this PyTorch's CUDA needs, give the container the devices (--gpus all), "
        remedy += "and try: python -c 'import torch; torch.zeros(1, device=\"cuda\")'"
        section.problem("devices", f"PyTorch sees none: {why}", remedy)
    else:
        section.skipped("devices, peer access", "there is none: ranks run on the CPU, and messages over Gloo")


def _judge_device(section: Section, accelerators: Accelerators, driver: Driver, index: int, who: str) -> None:
    device, of_driver = accelerators.devices[index], listed(accelerators.devices[index], driver)
    text = f"{accelerators.kind}:{index}, {device.name}"
    if device.error:
        section.problem(who, f"{text}: {device.error}", "see `nvidia-smi` and the kernel's log (dmesg) for the device")
        return
    assert device.total_bytes is not None
    assert device.free_bytes is not None
    text += f", {size_text(device.free_bytes)} of {size_text(device.total_bytes)} free"
    if not _has_kernels(device, accelerators.architectures):
        assert device.capability is not None
        number = ".".join(map(str, device.capability))
        remedy = f"install a build of PyTorch for it; this one is for {', '.join(accelerators.architectures)}"
        section.problem(who, f"{text}: this PyTorch has no kernels for compute capability {number}", remedy)
    elif of_driver is not None and of_driver.compute_mode == "Prohibited":
        remedy = f"sudo nvidia-smi -i {of_driver.index} -c DEFAULT"
        section.problem(who, f"{text}: its compute mode is Prohibited", remedy)
    elif of_driver is not None and of_driver.has_mig:
        remedy = "give each rank a whole device: NCCL does not connect slices of one"
        section.warning(who, f"{text}: it is divided into slices (MIG)", remedy)
    elif device.free_bytes < (1 - _MOST_USED) * device.total_bytes:
        remedy = "end other programs on it (nvidia-smi lists them), or plan with a --limit below what is free"
        section.warning(who, f"{text}: other programs hold memory", remedy)
    elif (lanes := _missing_lanes(of_driver)) is not None:
        section.warning(who, f"{text}: {lanes}", "reseat the device, or move it to a slot with more lanes")
    else:
        section.ok(who, text)


def _missing_lanes(device: Device | None) -> str | None:
    """In words, if PCIe runs on fewer lanes than device and slot have."""
    if device is None or device.pcie_lanes is None or device.pcie_lanes_now is None:
        return None
    if device.pcie_lanes_now >= device.pcie_lanes:
        return None
    return f"PCIe runs on {device.pcie_lanes_now} of {device.pcie_lanes} lanes"


def _has_kernels(device: Accelerator, architectures: Sequence[str]) -> bool:
    """Whether PyTorch's kernels run on a device: those of its major version, or newer ones made from PTX."""
    if device.capability is None or not architectures:
        return True
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
        if match is None:
            continue
        of = int(match[2]), int(match[3])
        if match[4]:  # sm_90a: for this one alone
            fits = of == device.capability
        else:
            fits = of <= device.capability and (match[1] == "compute" or of[0] == device.capability[0])
        if fits:
            return True
    return False


def _judge_visible(section: Section, number: int, environment: Mapping[str, str]) -> None:
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is not None and (named := len(given.split(","))) != number:
        text = f"CUDA_VISIBLE_DEVICES={given} names {named}, but PyTorch sees {number}"
        section.warning("devices", text, "name devices that exist, each once: what follows a wrong one is ignored")


def _judge_peers(section: Section, accelerators: Accelerators) -> None:
    numbers = range(len(accelerators.devices))
    pairs = [(a, b) for a in numbers for b in numbers if a < b]
    without = [pair for pair in pairs if not {pair, pair[::-1]} <= accelerators.peers]
    if not without:
        section.ok("peer access", f"both ways, in {len(pairs)} of {count_text(len(pairs), 'pair')} of devices")
        return
    told = ", ".join(f"{a}-{b}" for a, b in without[:8]) + (", …" if len(without) > 8 else "")
    remedy = "messages go through host memory there; if the devices share NVLink or a PCIe switch, look at IOMMU, ACS "
    remedy += "and the virtual machine's settings (NCCL's troubleshooting page)"
    section.warning("peer access", f"{len(without)} of {count_text(len(pairs), 'pair')} have none: {told}", remedy)


if __name__ == "__main__":
    print(look().to_json())
