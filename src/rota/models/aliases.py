"""Weights that share memory without being one Parameter: on several ranks nothing would keep them equal.

head.weight = embed.weight                      one Parameter: a tie, which `Stages.ties` finds
head.weight = nn.Parameter(embed.weight.data)   two Parameters on one memory: refused, unless both are in one stage
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rota.core.errors import SplitError
from rota.torch_internals import address_of

_NO_TENSORS = frozenset((type(None), bool, int, float, str, dict, OrderedDict, set))


@dataclass(slots=True)
class _Held:
    """A tensor, and its name in each stage that has it, registered or as a plain attribute."""

    tensor: Tensor
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
                yield from ((f"{prefix}{name}[{i}]", t, False) for i, t in enumerate(value) if isinstance(t, Tensor))


def refuse_aliases(modules: Sequence[nn.Module], name_in_model: Callable[[int, str], str]) -> None:
    """Refuse a trained weight whose memory another stage has as another tensor, or holds without registering it.

    Raises:
        SplitError: With both names.
    """
    by_id: dict[int, _Held] = {}
    for stage, module in enumerate(modules):
        for name, tensor, is_registered in tensors_of(module):
            held = by_id.setdefault(id(tensor), _Held(tensor))
            (held.registered if is_registered else held.plain).setdefault(stage, name)
    by_storage: dict[int, list[_Held]] = {}
    for held in by_id.values():
        if (storage := _storage(held.tensor)) is not None:
            by_storage.setdefault(storage, []).append(held)
    for sharing in by_storage.values():
        for weight in (held for held in sharing if held.is_trained):
            for other in sharing:
                at = _elsewhere(weight, other)
                if at is not None and _share_elements(_local(weight.tensor), _local(other.tensor)):
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


def _storage(tensor: Tensor) -> int | None:
    """What tensors on one memory have in common; None without memory, as of a sparse tensor, or one without elements.

    On meta, all addresses are 0, but each storage is an object of its own.
    """
    try:
        local = _local(tensor)
        return address_of(local.untyped_storage()) if local.numel() else None
    except (NotImplementedError, RuntimeError, ValueError):
        return None


def _local(tensor: Tensor) -> Tensor:
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard.detach()


def _share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors on one memory have an element in common; columns of one matrix have none, unlike a row."""
    spans = [_span_bytes(tensor) for tensor in (a, b)]
    if spans[0].stop <= spans[1].start or spans[1].stop <= spans[0].start:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    begin = min(span.start for span in spans)
    taken = torch.zeros(max(span.stop for span in spans) - begin, dtype=torch.bool, device="cpu")
    in_a, in_b = (
        taken.as_strided(
            [*tensor.shape, tensor.itemsize],
            [*(step * tensor.itemsize for step in tensor.stride()), 1],
            span.start - begin,
        )
        for tensor, span in zip((a, b), spans, strict=True)
    )
    in_a.fill_(True)
    return bool(in_b.any())


def _span_bytes(tensor: Tensor) -> range:
    """From its first to its last byte in the storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return range(begin, begin + (last + 1) * tensor.itemsize)
