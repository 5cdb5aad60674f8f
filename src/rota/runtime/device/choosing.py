"""Which device a rank's stages are on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rota.errors import PipelineError
from rota.models import Stages
from rota.runtime.device.host import HostDevice
from rota.runtime.device.protocol import Device
from rota.runtime.device.streams import StreamDevice

#: Makes the device of a type; types that are not named here are accelerators of PyTorch.
MAKERS: dict[str, Callable[[torch.device], Device]] = {"cpu": lambda _: HostDevice()}


def device_of(stages: Stages, local: Iterable[int]) -> Device:
    """The device of the stages `local`; the CPU if they have no tensors.

    Raises:
        PipelineError: a tensor has no memory, or two are on different devices.
    """
    first: tuple[str, int, torch.device] | None = None
    for stage in local:
        for name, tensor in stages[stage].state_dict().items():
            if tensor.is_meta:
                raise PipelineError(
                    f"{name} of stage {stage} has no memory (it is on meta); call "
                    "rota.materialize(stages, rota.local_stages(plan, mesh)) before the pipeline is made"
                )
            first = first or (name, stage, tensor.device)
            if tensor.device != first[2]:
                raise PipelineError(
                    f"{name} of stage {stage} is on {tensor.device}, but {first[0]} of stage {first[1]} on {first[2]}; "
                    f"move all stages of a rank to one device, such as by stages.modules[{stage}].to({str(first[2])!r})"
                )
    device = torch.device("cpu") if first is None else first[2]
    return device_at(device)


def device_at(device: torch.device) -> Device:
    """The device on which tensors of `device` are."""
    return MAKERS.get(device.type, StreamDevice)(device)
