"""Small values that ranks send each other outside of a step, as JSON in uint8 tensors.

PyTorch's object collectives send pickles, and unpickling runs code that the sender names. JSON does not.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in the order of the group's ranks. Collective.

    Args:
        value: what `json` writes: None, bool, int, float (nan and inf too), str, and lists and dicts of them with str
            keys. Tuples arrive as lists.
        group: the ranks that take part; the default group if None.

    Returns:
        One value per rank of the group, as `json` reads it; this rank's own as well.

    Raises:
        TypeError: `value` holds something else. The other ranks then wait: check what users give before the call.
        ValueError: a rank sent invalid JSON.
    """
    device = _device(group)
    data = _to_tensor(value)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    gathered = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [_from_tensor(each[: int(size)]) for each, size in zip(gathered, sizes, strict=True)]


def broadcast_json(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The value of the group's rank `source`, on every rank, as `json` reads it. Collective; no other value is used."""
    is_source = dist.get_rank(group) == source
    device = _device(group)
    data = _to_tensor(value).to(device) if is_source else torch.empty(0, dtype=torch.uint8, device=device)
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, group_src=source, group=group)
    if not is_source:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, group_src=source, group=group)
    return _from_tensor(data)


def _to_tensor(value: Any) -> torch.Tensor:
    _refuse_other_keys(value)
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(data: torch.Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())


def _device(group: dist.ProcessGroup | None) -> str:
    """The device that the group's collectives need their tensors on."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _refuse_other_keys(value: Any) -> None:
    """Raises TypeError for a key that is not a str: `json` would silently write the key 1 as "1"."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is a {type(key).__name__}; JSON keys are str")
            _refuse_other_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _refuse_other_keys(item)
