"""Weights that share memory without being one Parameter: on several ranks nothing would keep them equal.

head.weight = embed.weight                      one Parameter: a tie, which `Stages.ties` finds
head.weight = nn.Parameter(embed.weight.data)   two Parameters on one memory: refused, unless both are in one stage
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rota.core.errors import SplitError
from rota.torch_internals import address_of

_NO_TENSORS = frozenset((type(None), bool, int, float, str, dict, OrderedDict, set))


class _Region(NamedTuple):
    """The bytes of a tensor: from `begin` to before `end`, in one address space."""

    space: tuple[str, int]
    begin: int
    end: int


@dataclass(slots=True)
class _Held:
    """A tensor, and its name in each stage that has it, registered or as a plain attribute."""

    tensor: Tensor
    region: _Region
    registered: dict[int, str] = field(default_factory=dict)
    plain: dict[int, str] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad and bool(self.registered)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """What a module and those in it hold, by name: parameters and buffers (True), and tensors in attributes (False)."""
    for path, inner in module.named_modules():
        prefix = f"{path}." if path else ""
        attributes = vars(inner)
        for held in (attributes["_parameters"], attributes["_buffers"]):
            for name, value in held.items():
                if value is not None:
                    yield f"{prefix}{name}", value, True
        for name, value in attributes.items():
            if type(value) in _NO_TENSORS:  # most are: this runs for all modules of all stages
                continue
            if isinstance(value, Tensor):
                yield f"{prefix}{name}", value, False
            elif isinstance(value, list | tuple):
                yield from (
                    (f"{prefix}{name}[{i}]", one, False) for i, one in enumerate(value) if isinstance(one, Tensor)
                )


def refuse_aliases(modules: Sequence[nn.Module], name_in_model: Callable[[int, str], str]) -> None:
    """Refuse a trained weight whose memory another stage has as another tensor, or holds without registering it.

    Raises:
        SplitError: With both names.
    """
    by_id: dict[int, _Held] = {}
    for stage, module in enumerate(modules):
        for name, tensor, is_registered in tensors_of(module):
            if id(tensor) not in by_id:
                region = _region_of(tensor)
                if region is None:
                    continue
                by_id[id(tensor)] = _Held(tensor, region)
            held = by_id[id(tensor)]
            (held.registered if is_registered else held.plain).setdefault(stage, name)
    for overlapping in _overlapping(by_id.values()):
        for weight in (held for held in overlapping if held.is_trained):
            for other in overlapping:
                at = _elsewhere(weight, other)
                if at is not None and _share_elements(weight, other):
                    raise SplitError(_refusal(weight, other, at, name_in_model))


def _elsewhere(weight: _Held, other: _Held) -> int | None:
    """A stage in which `other` would not follow what is done to `weight`; None if there is none."""
    if other is weight:
        stages = {*weight.plain} - {*weight.registered}
    elif other.is_trained:
        stages = {*weight.registered} ^ {*other.registered}
    elif other.registered:
        stages = {*other.registered} - {*weight.registered}
    else:  # a stage of an unmodified model may have the attributes of all its modules
        stages = {*other.plain} if {*other.plain}.isdisjoint(weight.registered) else set()
    return min(stages, default=None)


def _refusal(weight: _Held, other: _Held, stage: int, name_in_model: Callable[[int, str], str]) -> str:
    def text(held: _Held, at: int | None = None) -> str:
        names = {**held.plain, **held.registered} if at is None or at not in held.plain else held.plain
        at = at if at in names else min(names)
        return f"{name_in_model(at, names[at])} of stage {at}"

    if other is weight:
        return (
            f"{text(weight)} is also in an attribute of another stage, {text(weight, stage)}, which does not register "
            "it, so its gradients there would be lost: assign it to an attribute itself, not in a list"
        )
    if other.is_trained:
        return (
            f"{text(weight)} and {text(other)} are two parameters on the same memory, which stages on different ranks "
            "cannot share: tie them as one parameter, such as head.weight = embed.weight, or give one of them memory "
            "of its own, nn.Parameter(weight.detach().clone())"
        )
    return (
        f"{text(other)} is a view of {text(weight)}, which is trained: on another rank it would keep its first values. "
        "Use the parameter itself in both stages, freeze it by requires_grad_(False), or copy it by clone()"
    )


def _region_of(tensor: Tensor) -> _Region | None:
    """None if it has no memory that is known, as a sparse tensor, one without elements, or of another kind."""
    try:
        tensor = _local(tensor)
        storage = tensor.untyped_storage()
        # On meta, all addresses are 0; the storage is what weights on one memory share.
        space, start = (("meta", address_of(storage)), 0)
        if storage.device.type != "meta":
            space, start = (storage.device.type, storage.device.index or 0), storage.data_ptr()
            if not start:
                return None
    except (NotImplementedError, RuntimeError, ValueError):
        return None
    if not tensor.numel():
        return None
    begin = start + int(tensor.storage_offset()) * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _Region(space, begin, begin + (last + 1) * tensor.itemsize)


def _local(tensor: Tensor) -> Tensor:
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard.detach()


def _overlapping(tensors: Iterable[_Held]) -> Iterator[list[_Held]]:
    """Tensors by the memory that they cover without a gap."""
    covered: list[_Held] = []
    space, end = None, 0
    for held in sorted(tensors, key=lambda held: held.region):
        if held.region.space != space or held.region.begin >= end:
            yield covered
            covered, space, end = [], held.region.space, 0
        covered.append(held)
        end = max(end, held.region.end)
    yield covered


def _share_elements(a: _Held, b: _Held) -> bool:
    """Whether they have an element in common; columns of one matrix have none, though their regions overlap."""
    if a.region.end <= b.region.begin or b.region.end <= a.region.begin:
        return False
    tensors = [_local(held.tensor) for held in (a, b)]
    if a.region.begin == b.region.begin or all(tensor.is_contiguous() for tensor in tensors):
        return True
    begin = min(a.region.begin, b.region.begin)
    taken = torch.zeros(max(a.region.end, b.region.end) - begin, dtype=torch.bool, device="cpu")

    def bytes_of(held: _Held, tensor: Tensor) -> Tensor:
        size, stride = tensor.itemsize, [step * tensor.itemsize for step in tensor.stride()]
        return taken.as_strided([*tensor.shape, size], [*stride, 1], held.region.begin - begin)

    bytes_of(a, tensors[0]).fill_(True)
    return bool(bytes_of(b, tensors[1]).any())
