"""What forwards save for their backwards, on the host for as long as nobody needs it.

    main thread    F0 ─────── O0: waits, lets go ──── L0: takes memory ──── B0: waits, reads
    copying           ╰─ to the host ─╯                     ╰─ back ─╯

Copied are whole storages, each once however many saved tensors view it, in the order in which they are saved, until the
part that the plan offloads is reached. What others keep alive anyway stays: weights, buffers, what the stage received
and what it read of the batch; and so do small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rota.core.errors import PipelineError
from rota.core.placement import Placement
from rota.core.tasks import Kind, Op
from rota.runtime.messages import tensors_in
from rota.torch_internals import address_of, version_of

_ENOUGH = 0.95  # of what is to be copied: small tensors stay
LEAST_BYTES = 4096  # smaller tensors cost more to copy than they hold

Computing: TypeAlias = Callable[[list[Any]], list[Any]]


@dataclass(slots=True, eq=False)
class Saved:
    """A storage that autograd saved: on the device, on the host, or on both while it is copied.

    `seen`: the tensors that were saved of it, each with its version: a later write would change what is copied.
    """

    storage: torch.UntypedStorage | None
    num_bytes: int
    host: torch.UntypedStorage | None = None
    seen: list[tuple[torch.Tensor, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A tensor that autograd saved, as a view of its storage."""

    saved: Saved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """The tensor. Raises PipelineError if its storage is not there."""
        if self.saved.storage is None:
            raise PipelineError("a stage that is offloaded differentiates before its backward; plan without offload")
        empty = torch.empty(0, dtype=self.dtype, device=self.saved.storage.device)
        return empty.set_(self.saved.storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, eq=False)
class Staying:
    """A tensor that autograd saved, and that stays: autograd compares no versions of what it does not keep itself."""

    detached: torch.Tensor  #: else it could be kept by its own graph
    version: int
    where: str

    def tensor(self) -> torch.Tensor:
        """The tensor. Raises PipelineError if it has been written to."""
        if version_of(self.detached) != self.version:
            raise _written(self.where)
        return self.detached


class _Packing:
    """Takes what the forward of one micro-batch saves, and says what becomes of it. `share` of its bytes are copied."""

    def __init__(self, share: float, staying: set[int], where: str) -> None:
        self._share, self._staying, self._where = share, staying, where
        self._copied: dict[int, Saved] = {}  # by the storage's address
        self._seen_bytes = self._copied_bytes = 0

    def copied(self) -> list[Saved]:
        """What is to be copied. Raises PipelineError if much less can be than planned."""
        if self._copied_bytes < _ENOUGH * self._share * self._seen_bytes:
            raise PipelineError(
                f"{self._where} saves {self._seen_bytes} bytes, of which the plan offloads {self._share:.0%}, but only "
                f"{self._copied_bytes} bytes are in tensors of {LEAST_BYTES} bytes or more; plan less offload_bytes"
            )
        return [*self._copied.values()]

    def pack(self, tensor: torch.Tensor) -> Staying | View:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return self._stay(tensor)
        if tensor.is_conj() or tensor.is_neg():
            return self._stay(tensor)
        storage = tensor.untyped_storage()
        address, num_bytes = address_of(storage), storage.nbytes()
        if address in self._staying:
            return self._stay(tensor)
        if address not in self._copied:
            self._seen_bytes += num_bytes
            if num_bytes < LEAST_BYTES or self._copied_bytes >= self._share * self._seen_bytes:
                self._staying.add(address)
                return self._stay(tensor)
            self._copied_bytes += num_bytes
            self._copied[address] = Saved(storage, num_bytes)
        saved = self._copied[address]
        saved.seen.append((tensor.detach(), version_of(tensor)))  # detached: it would hold its own graph
        return View(saved, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _stay(self, tensor: torch.Tensor) -> Staying:
        return Staying(tensor.detach(), version_of(tensor), self._where)


@final
class Offloading:
    """The copies of one rank's stages, in two threads, one for each direction."""

    def __init__(self, placement: Placement, modules: dict[int, nn.Module]) -> None:
        self._placement, self._modules = placement, modules
        self._to_host, self._back = (ThreadPoolExecutor(1, f"rota-{way}") for way in ("to-host", "from-host"))
        self._saved: dict[tuple[int, int], list[Saved]] = {}  # by stage and micro-batch
        self._copying: dict[tuple[Kind, int, int], Future[None]] = {}

    def begin(self) -> None:
        """Before the ops of a step. What a failed one has left goes."""
        for copy in self._copying.values():
            copy.cancel()
        self._saved.clear()
        self._copying.clear()

    def saving(self, op: Op, compute: Computing, inputs: Callable[[], Any], copied: Callable[..., None]) -> Computing:
        """A forward whose saved tensors are copied to the host behind it; `copied` calls what it gets, and times it."""
        stage, _, microbatch = op
        task, forward = self._placement.task(stage, Kind.O), self._placement.task(stage, Kind.F)
        assert task is not None
        assert forward is not None
        value = self._placement.value
        share = -value(task.held_bytes, microbatch) / value(forward.held_bytes, microbatch)
        module = self._modules[stage]
        where = f"stage {stage} ({type(module).__name__})"

        def run(received: list[Any]) -> list[Any]:
            staying = [*module.parameters(), *module.buffers(), *tensors_in((received, inputs()))]
            addresses = {address_of(t.untyped_storage()) for t in staying if t.layout is torch.strided}
            packing = _Packing(share, addresses, where)
            with saved_tensors_hooks(packing.pack, _unpack):
                outputs = compute(received)
            saved = self._saved[stage, microbatch] = packing.copied()
            self._copying[Kind.O, stage, microbatch] = self._to_host.submit(copied, _store, saved)
            return outputs

        return run

    def waiting(self, op: Op) -> Callable[[], None] | None:
        """What has to end before an op begins; None where nothing is copied for it."""
        awaited = {Kind.O: Kind.O, Kind.B: Kind.L, Kind.I: Kind.L}.get(op.kind)
        if awaited is None or self._placement.task(op.stage, awaited) is None:
            return None
        key = awaited, op.stage, op.microbatch

        def wait() -> None:
            self._copying.pop(key).result()

        return wait

    def offloaded(self, op: Op) -> Computing:
        """O: what has been copied goes from the device."""
        key = op.stage, op.microbatch

        def run(_: list[Any]) -> list[Any]:
            for saved in self._saved[key]:
                if any(version_of(tensor) != version for tensor, version in saved.seen):
                    raise _written(f"stage {op.stage}")
                saved.storage, saved.seen = None, []
            return []

        return run

    def loading(self, op: Op, copied: Callable[..., None]) -> Computing:
        """L: memory is taken again, and the copy back begins."""
        key = op.stage, op.microbatch

        def run(_: list[Any]) -> list[Any]:
            loaded = self._saved.pop(key)
            for saved in loaded:
                saved.storage = torch.empty(saved.num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
            self._copying[Kind.L, op.stage, op.microbatch] = self._back.submit(copied, _load, loaded)
            return []

        return run


def _store(stored: Iterable[Saved]) -> None:
    for saved in stored:
        assert saved.storage is not None
        saved.host = saved.storage.clone()


def _load(loaded: Iterable[Saved]) -> None:
    for saved in loaded:
        assert saved.host is not None
        assert saved.storage is not None
        saved.storage.copy_(saved.host)
        saved.host = None


def _unpack(packed: Staying | View) -> torch.Tensor:
    return packed.tensor()


def _written(where: str) -> PipelineError:
    return PipelineError(
        f"{where} writes into a tensor that its backward needs, after the operation that saved it; let it not write in "
        f"place, or plan without offload"
    )
