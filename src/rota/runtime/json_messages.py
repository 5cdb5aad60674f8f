"""Small values that ranks send each other outside of a step, as JSON in uint8 tensors.

PyTorch's object collectives send pickles, and unpickling runs code that the sender names. JSON does not.

    first collective    number of bytes │ the first of them, up to 1,016
    second collective   the rest, if there is any: each wait for other ranks may cost them a turn on the processor
"""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
import torch.distributed as dist

from rota.runtime.device.local import CPU, backends_of

_LENGTH = struct.Struct("<Q")
_NUM_FIRST = 1024 - _LENGTH.size


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in the order of the group's ranks, as `json` reads it; this rank's own as well. Collective.

    `value`: what `json` writes: None, bool, int, float (nan and inf too), str, and lists and dicts of them with str
    keys. Tuples arrive as lists. Raises TypeError for anything else, while the other ranks wait: check what users give
    before the call; and ValueError if a rank sent invalid JSON. `group`: the default one if None.
    """
    size = dist.get_world_size(group)
    begin, rest = (part.to(_device(group)) for part in _parts(value))
    begins = [torch.empty_like(begin) for _ in range(size)]
    dist.all_gather(begins, begin, group=group)
    padded = rest.new_zeros(max(map(_num_left, begins)))
    padded[: len(rest)] = rest
    rests = [torch.empty_like(padded) for _ in range(size)]
    if len(padded):
        dist.all_gather(rests, padded, group=group)
    return [*map(_joined, begins, rests)]


def broadcast_json(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The value of the group's rank `source`, on every rank, as `json` reads it. Collective; no other value is used."""
    own = value if dist.get_rank(group) == source else None
    begin, rest = (part.to(_device(group)) for part in _parts(own))
    dist.broadcast(begin, group_src=source, group=group)
    if num_left := _num_left(begin):
        rest = rest if len(rest) == num_left else rest.new_empty(num_left)
        dist.broadcast(rest, group_src=source, group=group)
    return _joined(begin, rest)


def _parts(value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The length of a value's JSON with its first bytes, in a tensor of always the same size; and its other bytes."""
    text = json.dumps(value).encode()
    begin = _LENGTH.pack(len(text)) + text[:_NUM_FIRST]
    return _to_tensor(begin.ljust(_LENGTH.size + _NUM_FIRST, b"\0")), _to_tensor(text[_NUM_FIRST:])


def _to_tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the user's default device is
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _num_left(begin: torch.Tensor) -> int:
    """How many bytes of the JSON are not in `begin`."""
    return max(_length_in(begin) - _NUM_FIRST, 0)


def _length_in(begin: torch.Tensor) -> int:
    length: int = _LENGTH.unpack(begin[: _LENGTH.size].cpu().numpy().tobytes())[0]
    return length


def _joined(begin: torch.Tensor, rest: torch.Tensor) -> Any:
    text = torch.cat([begin[_LENGTH.size :], rest])[: _length_in(begin)]
    return json.loads(text.cpu().numpy().tobytes())


def _device(group: dist.ProcessGroup | None) -> str:
    """The device that the group's collectives need their tensors on: the CPU, unless it takes those of others alone."""
    types = backends_of(group)
    return CPU if CPU in types else next(iter(types))
