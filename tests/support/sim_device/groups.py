"""Process groups for tensors on simulated devices.

A message or a collective is a kernel on the stream that is current, as in NCCL. Its values travel by Gloo; of these the
host waits for receives alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from support.sim_device.device import current_device
from support.sim_device.tensors import SimTensor

SIM = torch.device("sim", 0)
_TAKEN = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
#: What waits once a step has been enqueued, and what never waits in one.
END_OF_STEP = (READ := "StreamDevice.read.<locals>.numbers", "StreamDevice.times_ns")
OPENING = "opening a communicator"


def syncs_inside_steps() -> list[str]:
    """Where this rank's host has waited for its device, but for the end of a step, since the last call."""
    device = current_device()
    found = [f"{sync.operation} at {sync.where}" for sync in device.syncs if sync.operation not in END_OF_STEP]
    device.syncs.clear()
    return found


class _Enqueued(dist.Work):
    """A kernel on the stream that was current; or on the group's own, for which a stream waits by this event."""

    def __init__(self, behind: torch.Event | None = None) -> None:
        super().__init__()
        self._behind = behind

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._behind is not None:
            torch.accelerator.current_stream(SIM).wait_event(self._behind)
        return True

    def is_completed(self) -> bool:
        return True


class SimGroup(dist.ProcessGroup):
    """A process group for tensors of simulated devices."""

    #: For tests, which replace it; else nothing is kept, as each group has threads of Gloo.
    made: ClassVar[MutableSequence[SimGroup]] = deque(maxlen=0)

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._sends: list[tuple[Any, torch.Tensor]] = []  # Gloo tells nobody when one is through
        self._name, self.is_open = "", False
        self._own_stream: torch.Stream | None = None
        self._behind: torch.Event | None = None  # its last kernel; None if it has ended
        self.made.append(self)

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return "sim"

    def abort(self) -> None:
        self._behind = None

    def is_busy(self) -> bool:
        """Whether leaving it would wait for a kernel, which may wait for other ranks."""
        return self._behind is not None and not self._behind.query()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        (tensor,) = tensors
        if not isinstance(tensor, SimTensor):
            return self._gloo.allreduce([tensor], options)
        with self._stream_for(options) as work:
            values = self._launched("all_reduce", tensor)
            self._end_together()
            _asked(lambda: self._gloo.allreduce([values], options).wait())
            _write(tensor, values)
        return work()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        (tensor,) = tensors
        if not isinstance(tensor, SimTensor):
            return self._gloo.broadcast([tensor], options)
        is_sender = self.rank() == options.rootRank
        with self._stream_for(options) as work:
            if self.size() > 2:
                values = self._launched("broadcast", tensor)
                _asked(lambda: self._gloo.broadcast([values], options).wait())
                _write(tensor, values)
            elif is_sender:  # a message, see `rota.torch_internals.move_message`
                values = self._launched("send", tensor, writes=False)
                self._tell_end(1 - self.rank())
                self._sends.append((_asked(lambda: self._gloo.send([values], 1 - self.rank(), 0)), values))
            else:
                values = self._launched("recv", tensor, reads=False)
                self._end_after_sender(1 - self.rank(), tensor)
                _asked(lambda: self._gloo.recv([values], 1 - self.rank(), 0).wait())
                _write(tensor, values)
        return work()

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> dist.Work:
        (gathered,), (tensor,) = outputs, tensors
        if not isinstance(tensor, SimTensor):
            return self._gloo.allgather(outputs, tensors, options)
        with self._stream_for(options) as work:
            values = self._launched("all_gather", tensor, writes=False)
            parts = [self._launched("all_gather", part, reads=False) for part in gathered]
            _asked(lambda: self._gloo.allgather([parts], [values], options).wait())
            for part, of_rank in zip(gathered, parts, strict=True):
                _write(part, of_rank)
        return work()

    @contextmanager
    def _stream_for(self, options: Any) -> Iterator[Callable[[], dist.Work]]:
        """Inside, kernels go to the stream of a collective; what it yields makes the work behind them."""
        if not options.asyncOp:
            yield _Enqueued
            return
        self._own_stream = stream = self._own_stream or torch.Stream(SIM)
        stream.wait_event(torch.accelerator.current_stream(SIM).record_event())
        with stream:
            yield lambda: _Enqueued(stream.record_event())

    # Where kernels last, a receive begins no earlier than its send ends, and the kernels of a sum end together.

    def _tell_end(self, peer: int) -> None:
        if current_device().cost_ns is not None:
            end_ns = torch.tensor([current_device().current_stream.free_ns])
            self._sends.append((_asked(lambda: self._gloo.send([end_ns], peer, 0)), end_ns))

    def _end_after_sender(self, peer: int, tensor: SimTensor) -> None:
        if (cost_ns := current_device().cost_ns) is not None:
            end_ns, stream = torch.empty(1, dtype=torch.int64), current_device().current_stream
            _asked(lambda: self._gloo.recv([end_ns], peer, 0).wait())
            stream.free_ns = max(stream.free_ns, int(end_ns) + cost_ns("recv", [tensor.block]))

    def _end_together(self) -> None:
        if current_device().cost_ns is not None:
            stream, options = current_device().current_stream, dist.AllreduceOptions()
            end_ns, options.reduceOp = torch.tensor([stream.free_ns]), dist.ReduceOp.MAX
            _asked(lambda: self._gloo.allreduce([end_ns], options).wait())
            stream.free_ns = int(end_ns)

    def _launched(self, name: str, tensor: torch.Tensor, *, reads: bool = True, writes: bool = True) -> torch.Tensor:
        assert isinstance(tensor, SimTensor), f"{name} got a tensor on {tensor.device}"
        assert tensor.is_contiguous(), f"{name} got a tensor that is not contiguous, as NCCL does not take it"
        assert tensor.dtype in _TAKEN, f"{name} got {tensor.dtype}, which NCCL does not take"
        block = tensor.block
        if not self.is_open:  # the hosts wait for each other
            self.is_open = True
            block.device.host_waits({}, OPENING)
        block.device.launch(name, [block] if reads else [], [block] if writes else [])
        self._behind = torch.accelerator.current_stream(SIM).record_event()
        return tensor.inner.detach().clone(memory_format=torch.contiguous_format)


def _asked(act: Callable[[], Any]) -> Any:
    """As NCCL, with an error of its own."""
    try:
        return act()
    except RuntimeError as error:
        raise dist.DistBackendError(str(error)) from error


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    assert isinstance(tensor, SimTensor)
    with torch.no_grad():
        tensor.inner.copy_(values)


dist.Backend.register_backend("sim", SimGroup, devices=["sim"])
