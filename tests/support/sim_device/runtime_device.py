"""The simulated device as the runtime sees it, with a process group for its tensors.

A message or a collective is a kernel on the stream that is current, as in NCCL. Its values travel by Gloo; of these the
host waits for receives alone. A mark's time is the host's, or later where kernels last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from rota.core.programs.device_steps import COMPUTE
from rota.runtime.device import choosing
from support.sim_device.device import Event, Stream, current_device
from support.sim_device.tensors import SimTensor

SIM = torch.device("sim", 0)
_TAKEN = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
opened: list[str] = []  # this process's groups that have been used, in order
_END_OF_STEP = ("read", "times_ns")  # what the host may wait for, once a step has been enqueued


@final
class SimRuntimeDevice:
    """See `rota.runtime.device.protocol.QueuedDevice`."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device, self.is_queued, self.backend = torch_device, True, "sim"
        self.hardware = current_device()

    def begin(self) -> None:
        pass

    # --- streams ------------------------------------------------------------------------------------------------------

    def stream(self, name: str) -> Stream:
        return self.hardware.default if name == COMPUTE else self.hardware.stream(name)

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        return self.hardware.use(stream)

    def record(self, stream: Stream) -> Event:
        return stream.record_event()

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def is_done(self, event: Event) -> bool:
        return event.query()

    def keep_for(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)  # type: ignore[arg-type]

    def synchronize(self) -> None:
        self.hardware.synchronize()

    def reset_peak(self) -> None:
        self.hardware.peak_bytes = self.hardware.allocated_bytes

    def peak_bytes(self) -> int:
        return self.hardware.peak_bytes

    # --- time ---------------------------------------------------------------------------------------------------------

    def mark(self) -> Event:
        return self.mark_on(self.hardware.current_stream)

    def mark_on(self, stream: Stream) -> Event:
        return stream.record_event()

    def times_ns(self, marks: Sequence[Event]) -> list[int]:
        if marks:
            last_ns = max(mark.time_ns for mark in marks)
            self.hardware.host_waits(self.hardware.current_stream.clock, "times_ns", last_ns)
        return [mark.time_ns for mark in marks]

    # --- numbers ------------------------------------------------------------------------------------------------------

    def number(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(()).to(torch.float64, copy=True)

    def numbers(self, numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64).to(self.torch_device, non_blocking=True)

    def read(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        copy = tensor.to("cpu", non_blocking=True)
        copied = self.hardware.current_stream.record_event()

        def numbers() -> list[float]:
            if not copied.query():
                self.hardware.host_waits(copied.clock, "read")
            found: list[float] = copy.tolist()
            return found

        return numbers

    # --- randomness ---------------------------------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        self.hardware.rng_state = torch.Generator().manual_seed(seed).get_state()

    def random_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.get_rng_state(), self.hardware.rng_state

    def set_random_state(self, state: tuple[torch.Tensor, torch.Tensor]) -> None:
        torch.set_rng_state(state[0])
        self.hardware.rng_state = state[1]


def syncs_inside_steps() -> list[str]:
    """Where this rank's host has waited for its device, but for the end of a step, since the last call."""
    device = current_device()
    found = [f"{sync.operation} at {sync.where}" for sync in device.syncs if sync.operation not in _END_OF_STEP]
    device.syncs.clear()
    return found


# --- messages and collectives -----------------------------------------------------------------------------------------


class _Done(dist.Work):
    """Its kernel is on the stream that was current, so whoever waits on that stream need not wait."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class SimGroup(dist.ProcessGroup):
    """A process group for tensors of simulated devices."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._sends: list[tuple[Any, torch.Tensor]] = []  # Gloo tells nobody when one is through
        self._name, self._is_open = "", False

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return "sim"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        values = self._launched("send", tensor, writes=False)
        self._tell_end(peer, tag)
        self._sends.append((_asked(lambda: self._gloo.send([values], peer, tag)), values))
        return _Done()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        values = self._launched("recv", tensor, reads=False)
        self._end_after_sender(peer, tag, tensor)
        _asked(lambda: self._gloo.recv([values], peer, tag).wait())
        _write(tensor, values)
        return _Done()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        (tensor,) = tensors
        if not isinstance(tensor, SimTensor):
            return self._gloo.allreduce([tensor], options)
        values = self._launched("all_reduce", tensor)
        self._end_together()
        _asked(lambda: self._gloo.allreduce([values], options).wait())
        _write(tensor, values)
        return _Done()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        (tensor,) = tensors
        if not isinstance(tensor, SimTensor):
            return self._gloo.broadcast([tensor], options)
        if self.size() == 2:  # a message, see `rota.torch_internals.move_message`
            peer, is_sender = 1 - self.rank(), self.rank() == options.rootRank
            return self.send([tensor], peer, 0) if is_sender else self.recv([tensor], peer, 0)
        values = self._launched("broadcast", tensor)
        _asked(lambda: self._gloo.broadcast([values], options).wait())
        _write(tensor, values)
        return _Done()

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> dist.Work:
        (gathered,), (tensor,) = outputs, tensors
        if not isinstance(tensor, SimTensor):
            return self._gloo.allgather(outputs, tensors, options)
        values = self._launched("all_gather", tensor, writes=False)
        found = [self._launched("all_gather", each, reads=False) for each in gathered]
        _asked(lambda: self._gloo.allgather([found], [values], options).wait())
        for each, of_rank in zip(gathered, found, strict=True):
            _write(each, of_rank)
        return _Done()

    def abort(self) -> None:
        """Nothing of it waits once a call has returned."""

    def barrier(self, options: Any) -> dist.Work:
        _asked(lambda: self._gloo.barrier(options).wait())
        return _Done()

    # Where kernels last, a receive begins no earlier than its send ends, and the kernels of a sum end together.

    def _tell_end(self, peer: int, tag: int) -> None:
        if current_device().cost_ns is not None:
            end_ns = torch.tensor([current_device().current_stream.free_ns])
            self._sends.append((_asked(lambda: self._gloo.send([end_ns], peer, tag)), end_ns))

    def _end_after_sender(self, peer: int, tag: int, tensor: torch.Tensor) -> None:
        if (cost_ns := current_device().cost_ns) is not None:
            assert isinstance(tensor, SimTensor)
            end_ns, stream = torch.empty(1, dtype=torch.int64), current_device().current_stream
            _asked(lambda: self._gloo.recv([end_ns], peer, tag).wait())
            stream.free_ns = max(stream.free_ns, int(end_ns) + cost_ns("recv", [tensor.block]))

    def _end_together(self) -> None:
        if current_device().cost_ns is not None:
            stream, options = current_device().current_stream, dist.AllreduceOptions()
            end_ns, options.reduceOp = torch.tensor([stream.free_ns]), dist.ReduceOp.MAX
            _asked(lambda: self._gloo.allreduce([end_ns], options).wait())
            stream.free_ns = int(end_ns)

    def _launched(self, name: str, tensor: torch.Tensor, *, reads: bool = True, writes: bool = True) -> torch.Tensor:
        if not self._is_open:  # the first one makes the communicator, for which all its hosts wait
            self._is_open = True
            opened.append(self._name)
        assert isinstance(tensor, SimTensor), f"{name} got a tensor on {tensor.device}"
        assert tensor.is_contiguous(), f"{name} got a tensor that is not contiguous, as NCCL does not take it"
        assert tensor.dtype in _TAKEN, f"{name} got {tensor.dtype}, which NCCL does not take"
        block = tensor.block
        block.device.launch(name, [block] if reads else [], [block] if writes else [], block.device.current_stream)
        return tensor.inner.detach().clone(memory_format=torch.contiguous_format)


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    assert isinstance(tensor, SimTensor)
    with torch.no_grad():
        tensor.inner.copy_(values)


def _asked(act: Callable[[], Any]) -> Any:
    """As NCCL, with an error of its own."""
    try:
        return act()
    except RuntimeError as error:
        raise dist.DistBackendError(str(error)) from error


dist.Backend.register_backend("sim", SimGroup, devices=["sim"])
choosing.MAKERS["sim"] = SimRuntimeDevice
