"""Stages that wait instead of computing, and stages that count what is alive at their boundaries."""

from __future__ import annotations

import ctypes
import sys
import time
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_PR_SET_TIMERSLACK = 29  # linux/prctl.h
FORWARD_S, BACKWARD_S = 0.005, 0.010


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, __: Tensor) -> Tensor:
        begun_s = time.perf_counter()
        made = x.clone()
        _sleep_until(begun_s + FORWARD_S)
        return made

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        begun_s = time.perf_counter()
        made = gradient.clone()
        _sleep_until(begun_s + BACKWARD_S)
        return made, None


def _sleep_until(end_s: float) -> None:
    time.sleep(max(end_s - time.perf_counter(), 0))


class Waiting(nn.Module):
    """A forward of 5 ms and a backward of 10 ms that need no core."""

    def __init__(self) -> None:
        super().__init__()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # else a sleep may last 50 µs longer
        self.anchor = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(x, self.anchor)


class Counting(nn.Module):
    """A linear layer; `most_alive` tells, for each kind, how many tensors that crossed its boundaries lived at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.crossed: defaultdict[str, list[StorageWeakRef]] = defaultdict(list)
        self.most_alive: defaultdict[str, int] = defaultdict(int)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.note("received", x)
        self.note("sent", y)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.note("gradients sent", gradient))
        y.register_hook(lambda gradient: self.note("gradients received", gradient))
        return y

    def forget(self) -> None:
        self.crossed.clear()
        self.most_alive.clear()

    def note(self, kind: str, tensor: Tensor) -> None:
        time.sleep(0.002)  # what is on its way gets there
        self.crossed[kind].append(StorageWeakRef(tensor.untyped_storage()))
        for each, storages in self.crossed.items():
            storages[:] = [storage for storage in storages if not storage.expired()]
            self.most_alive[each] = max(self.most_alive[each], len(storages))
