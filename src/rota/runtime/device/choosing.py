"""Which device a rank's stages are on, whether all ranks' devices go together, and how much of it messages may keep."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from rota.core.errors import PipelineError
from rota.core.placement import Placement
from rota.core.programs.occupancy import MostCtas, most_ctas, num_slots
from rota.models import Stages
from rota.runtime.device.local import CPU, property_of
from rota.runtime.device.protocol import Device, HostDevice
from rota.runtime.device.streams import StreamDevice

_MAX_CTAS = "NCCL_MAX_CTAS"  # where it is set, NCCL takes it instead of a group's options


def device_at(device: torch.device) -> Device:
    """The device on which tensors of `device` are."""
    return HostDevice() if device.type == CPU else StreamDevice(device)


def placed_on(stages: Stages, local: Iterable[int]) -> torch.device | None:
    """Where the tensors of the stages `local` are; None if they have none.

    Raises PipelineError if a tensor has no memory, or if two are on different devices.
    """
    first: tuple[str, int, torch.device] | None = None
    for stage in local:
        for name, tensor in stages[stage].state_dict().items():
            if tensor.is_meta:
                raise PipelineError(
                    f"{name} of stage {stage} has no memory (it is on meta); call "
                    "rota.materialize(stages, rota.local_stages(plan, mesh)) before the pipeline is made. If an "
                    "earlier Pipeline had this stage on another rank, it was freed here: split a new model"
                )
            first = first or (name, stage, tensor.device)
            if tensor.device != first[2]:
                raise PipelineError(
                    f"{name} of stage {stage} is on {tensor.device}, but {first[0]} of stage {first[1]} on {first[2]}; "
                    "move all stages of a rank to one device: "
                    "stages.to(rota.local_device(), rota.local_stages(plan, mesh))"
                )
    return None if first is None else first[2]


# --- all ranks --------------------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """What a rank tells the others of its device; `type` is "" if its stages have no tensors.

    `unit`: identifies a piece of hardware; "" if PyTorch does not know. `error`: why it has no device.
    """

    type: str = ""
    name: str = ""
    host: str = ""
    unit: str = ""
    error: str = ""


def describe_placed(stages: Stages, local: Callable[[], Iterable[int]]) -> Placed:
    """What this rank tells the others. `local` finds its stages."""
    try:
        device = placed_on(stages, local())
    except PipelineError as error:
        return Placed(error=str(error))
    if device is None:
        return Placed()
    return Placed(device.type, str(device), socket.gethostname(), _unit_of(device))


def _unit_of(device: torch.device) -> str:
    return "" if device.type == CPU else str(property_of(device, "uuid") or "")


def refuse_mixed(of_ranks: Sequence[Placed]) -> str:
    """The type of device that all ranks have, "cpu" if none has a tensor.

    Raises PipelineError if a rank has no device, if types differ, or if two ranks share an accelerator.
    """
    if refused := [f"rank {rank}: {placed.error}" for rank, placed in enumerate(of_ranks) if placed.error]:
        raise PipelineError(refused[0])
    by_type: dict[str, list[int]] = {}
    by_unit: dict[str, int] = {}
    for rank, placed in enumerate(of_ranks):
        if placed.type:
            by_type.setdefault(placed.type, []).append(rank)
        if placed.unit and (other := by_unit.setdefault(placed.unit, rank)) != rank:
            raise PipelineError(
                f"ranks {other} and {rank} both have their stages on {placed.name} of {placed.host}, but messages go "
                f"from one device to another (NCCL refuses duplicates); give each process its own: "
                f"stages.to(rota.local_device(), rota.local_stages(plan, mesh)); if that is this one on both, let each "
                f"process see all devices of its machine, or a different one"
            )
    if len(by_type) > 1:
        places = ", ".join(
            f"those of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} on {kind}"
            for kind, ranks in by_type.items()
        )
        raise PipelineError(
            f"the ranks' stages are on devices of different types: {places}; move all: "
            f"stages.to(rota.local_device(), rota.local_stages(plan, mesh))"
        )
    return next(iter(by_type), "cpu")


def num_multiprocessors(device: torch.device) -> int | None:
    """How many multiprocessors an accelerator has; None if PyTorch does not know."""
    number: int | None = property_of(device, "multi_processor_count")
    return number


def ctas_within(
    num_multiprocessors: int, placement: Placement, tied: Iterable[tuple[int, ...]], num_replicas: int
) -> MostCtas:
    """How many CTAs messages and reductions may have on devices with so many multiprocessors.

    `tied`: the ranks of each group of tied weights. Raises PlanError if there are too few multiprocessors, and
    PipelineError if the user lets NCCL take more.
    """
    slots = num_slots(placement, tied, replicas=num_replicas > 1)
    most = most_ctas(placement, slots, num_multiprocessors)
    wish = os.environ.get(_MAX_CTAS, "")
    if wish.isdecimal() and int(wish) > most.everywhere:
        raise PipelineError(
            f"{_MAX_CTAS} is {wish}, but up to {slots} kernels can be on a device at once, which has "
            f"{num_multiprocessors} multiprocessors: kernels that wait for other ranks could keep all of them, and the "
            f"step would hang; set it to at most {most.everywhere}, or unset it"
        )
    return most
