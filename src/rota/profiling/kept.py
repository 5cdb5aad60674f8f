"""Which bytes a forward leaves behind for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rota.runtime.messages import flatten
from rota.runtime.split_backward import WeightWork


def kept_bytes(run: Callable[[], Any], inputs: Iterable[torch.Tensor], not_counted: Iterable[torch.Tensor]) -> int:
    """Bytes of all storages that autograd saves while `run()` computes, and of `inputs` that want a gradient.

    A storage counts once and whole, however many views of it are saved, since one view keeps all of it alive.
    Storages of `not_counted` (parameters, buffers, the step's own batch) are there anyway.
    """
    storages: dict[int, int] = {}
    saved: list[torch.Tensor] = []  # kept alive, so that no other storage gets the same address meanwhile

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        run()
    for tensor in inputs:
        if tensor.requires_grad:  # autograd's leaf holds it
            count(tensor)
    for tensor in not_counted:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def bytes_for_weights(work: WeightWork, not_counted: Iterable[torch.Tensor]) -> int:
    """Bytes of all storages that I leaves for W, counted likewise."""
    tensors = list(work.tensors())  # kept alive, as above
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    for tensor in not_counted:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def num_bytes(value: Any, only_with_gradient: bool = False) -> int:
    """Bytes of the tensors in a value that crosses a boundary."""
    tensors, _ = flatten(value, "a stage")
    return sum(t.numel() * t.element_size() for t in tensors if t.requires_grad or not only_with_gradient)


def static_bytes(module: torch.nn.Module) -> int:
    """Parameters, their gradients, and buffers; an optimizer's state is the user's to add."""
    parameters = sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in module.parameters())
    return parameters + sum(b.numel() * b.element_size() for b in module.buffers())
