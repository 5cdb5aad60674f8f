"""Values between ranks on `torch.distributed`.

`Transport` makes the messages of a plan: it posts receives, and releases sent tensors as soon as they are through. A
step that learns sends each activation's layout first; other steps send only tensors, into buffers that the receiver
allocates when it posts.

`send_value` and `receive_value` send any value outside of a plan, such as the outputs of the last stage:

    sender     size of the text ─▶ layout as JSON, or an error instead ──▶ tensor ─▶ tensor …     receiver
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from rota.core.errors import LostRankError, PipelineError
from rota.core.programs.actions import Message, ValueKey
from rota.core.tasks import Transfer
from rota.runtime.gradient_flags import GradientFlags, with_zeros
from rota.runtime.gradients.split_backward import Gradients
from rota.runtime.messages import (
    Format,
    Layout,
    describe,
    empty,
    flatten,
    from_bytes,
    layout_of,
    tensor_layouts,
    to_bytes,
    unflatten,
)
from rota.runtime.recorder import Marks
from rota.torch_internals import backend_of


class Transport:
    """One rank's messages between CPUs."""

    def __init__(self, group: dist.ProcessGroup, everyone: dist.ProcessGroup) -> None:
        self._backend, self._everyone = (backend_of(ranks, torch.device("cpu")) for ranks in (group, everyone))
        self.flags = GradientFlags()
        self.marks = Marks()
        #: What was posted and not taken: the works, the buffers, and the format of the value.
        self._posted: dict[ValueKey, tuple[list[Any], list[torch.Tensor], Format]] = {}
        # Gloo reports the end of a send only to whoever waits for it, so a thread waits, and releases the tensors.
        # The thread polls while sends are pending, because each wake-up takes the GIL from the main thread.
        self._sending: deque[tuple[Message, list[Any], list[torch.Tensor]]] = deque()
        self._releasing = threading.Lock()
        self._awake = False
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._failure: LostRankError | None = None
        self.oldest: Transfer | None = None  # of the sends that are not through yet
        self._reaper = threading.Thread(target=self._reap, name="rota-sends", daemon=True)
        self._reaper.start()

    def begin(self, marks: Marks) -> None:
        """A new step; `marks` gets the times of its messages."""
        self.marks = marks

    # --- receiving ------------------------------------------------------------------------------------------------

    def receiving(self, message: Message, formats: dict[ValueKey, Format], learns: bool) -> Bound:
        """What starts to receive a message in each step, and what waits for its value.

        The value is an activation (tensors that need a gradient are leaves) or a list of gradients; one that is missing
        is None. `formats`: of activations. If it `learns`, the layout of an activation comes first.

        Buffers are new ones each time: autograd, hooks and modules may hold on to them, and must not see them change.
        """
        key, sender, flags, posted = message.value, message.transfer.sender, self.flags, self._posted
        edge, is_gradient, _ = key
        learns = learns and not is_gradient

        def post() -> None:
            if learns:
                formats[key] = Format(self.receive_layout(message))
            form, shapes = expected(formats, key)
            if is_gradient and flags.travel(edge, len(shapes)):
                shapes = [((len(shapes),), torch.uint8), *shapes]
            buffers = [torch.empty(shape, dtype=dtype, device=_CPU) for shape, dtype in shapes]
            posted[key] = [self.post(buffer, message) for buffer in buffers], buffers, form

        def take() -> Any:
            works, buffers, form = posted.pop(key)
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                del work  # see `close`
                works.clear()
                raise lost(sender, message) from error
            if not is_gradient:
                return activation(buffers, form)
            return buffers if len(buffers) == len(form.gradients) else flags.read(edge, buffers[0], buffers[1:])

        return post, take

    def receive_layout(self, message: Message) -> Layout:
        """Wait for the layout of an activation."""
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        _wait(self.post(size, message), message)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        _wait(self.post(data, message), message)
        return from_bytes(data)

    def post_flags(self, message: Message, form: Format) -> tuple[torch.Tensor, Any]:
        """Start to receive the flags of gradients alone; returns the buffer and the work, for `take_flags`."""
        flags = torch.empty(len(form.gradients), dtype=torch.uint8, device="cpu")
        return flags, self.post(flags, message)

    def take_flags(self, message: Message, posted: tuple[torch.Tensor, Any]) -> torch.Tensor:
        """Wait for the flags that `post_flags` receives."""
        flags, work = posted
        _wait(work, message)
        return flags

    def post(self, buffer: torch.Tensor, message: Message) -> Any:
        """Start to receive a tensor of the message; returns the work to wait for."""
        try:
            return self._backend.recv([as_sent(buffer)], message.transfer.sender, 0)
        except RuntimeError as error:
            raise lost(message.transfer.sender, message) from error

    def awaited(self, frames: list[FrameType]) -> Message | None:
        """The message that a thread with this stack waits for; None if none."""
        here = [frame for frame in frames if frame.f_code.co_filename == _wait.__code__.co_filename]
        waiting = (frame for frame in here if frame.f_code.co_name in ("take", "_wait"))
        return next((frame.f_locals.get("message") for frame in waiting), None)

    # --- sending --------------------------------------------------------------------------------------------------

    def sending(self, message: Message, formats: dict[ValueKey, Format], learns: bool) -> Callable[[Any], None]:
        """What sends the message's value in each step.

        That is an activation, after its layout if it `learns`, else its layout must be the same as before; or the
        gradients of an edge's tensors, back to the rank that computed these tensors.
        """
        if message.value[1]:
            return partial(self._send_gradients, message, formats)
        return partial(self._send_value, message, formats, learns)

    def _send_value(self, message: Message, formats: dict[ValueKey, Format], learns: bool, value: Any) -> None:
        layout, tensors = outgoing(formats, message, value, learns)
        self.send(message, tensors if layout is None else [*as_tensors(layout), *tensors])

    def _send_gradients(self, message: Message, formats: dict[ValueKey, Format], gradients: Gradients) -> None:
        flags, tensors = outgoing_gradients(self.flags, formats, message, gradients, _CPU)
        self.send(message, tensors if flags is None else [flags, *tensors])

    def send(self, message: Message, tensors: list[torch.Tensor]) -> None:
        """Send these tensors of the message: all, or on a queued device what travels between the hosts."""
        receiver, send = message.transfer.receiver, self._backend.send
        self.marks.sent[message.column] = time.monotonic_ns()
        tensors = [as_sent(tensor) for tensor in tensors]
        try:
            works = [send([tensor], receiver, 0) for tensor in tensors]
        except RuntimeError as error:
            del send  # see `close`
            raise lost(receiver, message) from error
        self._sending.append((message, works, tensors))
        if not self._awake:
            self._awake = True
            self._wake.put(True)

    def _reap(self) -> None:
        while self._wake.get():
            while True:
                time.sleep(_PAUSE_S)
                self._awake = False  # before the check: a later send wakes it again
                if not self._sending:
                    break
                self._awake = True
                self._release_sent()

    def _release_sent(self) -> None:
        """Wait for all sends so far, and release their tensors, which must not outlive their transfers."""
        with self._releasing:
            while self._sending:
                message, works, _ = self._sending[0]
                self.oldest = message.transfer
                try:
                    for work in works:
                        work.wait()
                except Exception:
                    self._failure = self._failure or lost(message.transfer.receiver, message)
                self.marks.through[message.column] = time.monotonic_ns()
                del works, _
                self._sending.popleft()
            self.oldest = None

    def drain(self) -> None:
        """Wait until all sends are through. Raises LostRankError if one failed."""
        self._release_sent()
        if self._failure is not None:
            raise self._failure

    def all_reduce(self, tensor: torch.Tensor, how: dist.AllreduceOptions, doing: str) -> None:
        """`dist.all_reduce` over `everyone`, without its checks. `how`: `MAX` or `SUM`; `doing`: if a rank is lost."""
        try:
            self._everyone.allreduce([tensor], how).wait()
        except RuntimeError as error:
            raise _lost_together(doing) from error

    def close(self) -> None:
        """Stop the thread that waits for sends, and release the process groups."""
        self._wake.put(False)
        self._reaper.join(timeout=1)  # stuck only if a peer does not receive
        self._posted.clear()  # what a failed step has posted keeps the connections open, too
        del self._backend, self._everyone


#: What starts to receive a message, and what waits for its value.
Bound: TypeAlias = tuple[Callable[[], None], Callable[[], Any]]
_PAUSE_S = 0.001
_CPU = torch.device("cpu")


@contextmanager
def collective(doing: str) -> Iterator[None]:
    """Turn errors of a collective operation into a LostRankError that says what the ranks were doing."""
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise  # this rank's own, such as an index out of range in an earlier kernel
    except RuntimeError as error:
        raise _lost_together(doing) from error


def _lost_together(doing: str) -> LostRankError:
    return LostRankError("lost a rank", doing)


def _all_reduce_options(how: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = how
    return options


MAX, SUM = map(_all_reduce_options, (dist.ReduceOp.MAX, dist.ReduceOp.SUM))


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is sent: contiguous, and real if it is complex; the same memory if possible."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).contiguous()


# --- formats ----------------------------------------------------------------------------------------------------------


def expected(formats: Mapping[ValueKey, Format], value: ValueKey) -> tuple[Format, list[tuple[Any, torch.dtype]]]:
    """The format of the activation to which the value belongs, and shape and dtype of each tensor that comes."""
    edge, is_gradient, microbatch = value
    form = formats[edge, False, microbatch]
    return form, form.gradients if is_gradient else form.tensors


def activation(buffers: list[torch.Tensor], form: Format) -> Any:
    """The value that was received into the buffers; tensors that need a gradient are leaves."""
    for i in form.leaves:
        buffers[i].requires_grad_()
    return buffers[0] if form.lone else unflatten(iter(buffers), form.layout)


def outgoing(
    formats: dict[ValueKey, Format], message: Message, value: Any, learns: bool
) -> tuple[Layout | None, list[torch.Tensor]]:
    """What is sent of an activation: its layout, None if the receiver knows it, and its tensors.

    Raises PipelineError if the layout is not the one that the receiver knows.
    """
    if not learns and formats[message.value].is_of(value):
        return None, [value.detach()]
    where = f"stage {message.transfer.source.stage}"
    tensors, layout = flatten(value, where)
    if learns:
        formats[message.value] = Format(layout)
    elif layout != (known := formats[message.value].layout):
        remedy = "if its shapes depend on the data, use Pipeline(…, dynamic_shapes=True)"
        if tensor_layouts(layout) == tensor_layouts(known):
            remedy = "return a changing number as a tensor, or use Pipeline(…, dynamic_shapes=True)"
        raise PipelineError(
            f"{message.transfer}: {where} made {describe(layout)}, after {describe(known)} in an earlier step with "
            f"inputs of the same shapes; {remedy}"
        )
    return layout if learns else None, [tensor.detach() for tensor in tensors]


def outgoing_gradients(
    flags: GradientFlags,
    formats: Mapping[ValueKey, Format],
    message: Message,
    gradients: Gradients,
    device: torch.device,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """What is sent of gradients: flags, None if they have none, and their tensors, which zeros complete."""
    edge = message.value[0]
    sent = flags.to_send(edge, gradients) if flags.travel(edge, len(gradients)) else None
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) == len(gradients):
        return sent, present
    if sent is None:
        flags.note_zeros(edge, gradients)
    return sent, with_zeros(gradients, expected(formats, message.value)[0], device)


def as_tensors(layout: Layout) -> list[torch.Tensor]:
    """The layout as `Transport.receive_layout` expects it: its size, and its bytes."""
    data = to_bytes(layout)
    return [torch.tensor([len(data)], device="cpu"), data]


def _wait(work: Any, message: Message) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        del work  # see `Transport.close`
        raise lost(message.transfer.sender, message) from error


def lost(peer: int, message: Message) -> LostRankError:
    """The error of a message whose other side is gone."""
    doing = "waiting for" if peer == message.transfer.sender else "sending"
    return LostRankError(f"lost rank {peer}", f"{doing} {message.transfer}")


# --- outside of a plan ------------------------------------------------------------------------------------------------


def bring_outputs(
    made: dict[int, Any],
    ranks: tuple[int, ...],
    asking: list[int],
    where: str,
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[int, Any]:
    """Give each rank in `asking` the last stage's outputs. Collective over `group`.

    `made`: the outputs, on the last stage's `ranks`. `where` names that stage in errors. `device`: see `receive_value`.
    """
    here, rank = made, dist.get_rank(group)
    refusal: PipelineError | None = None
    for other in asking:
        if other not in ranks:
            with collective(f"bringing outputs from rank {ranks[0]} to rank {other}"):
                if rank == ranks[0]:
                    try:
                        send_value(made, where, other, group)
                    except PipelineError as error:  # each that asks must get it, or it would wait
                        refusal = error
                elif rank == other:
                    here = receive_value(ranks[0], group, device)
    if refusal is not None:
        raise refusal
    return here


def send_value(value: Any, where: str, receiver: int, group: dist.ProcessGroup) -> None:
    """Send tensors, or tuples, lists and dicts of them. Raises PipelineError, on both ranks, for any other value.

    `where` names the stage in errors.
    """
    refusal: PipelineError | None = None
    tensors: list[torch.Tensor] = []
    try:
        tensors, layout = flatten(value, where)
        text = json.dumps({"layout": layout, "on_host": [tensor.device.type == "cpu" for tensor in tensors]})
    except PipelineError as error:  # the receiver must get it, or it would wait
        refusal, text = error, json.dumps({"refusal": str(error)})
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    for tensor in (torch.tensor([data.numel()], device="cpu"), data, *tensors):
        dist.send(as_sent(tensor.detach().cpu()), group_dst=receiver, group=group)
    if refusal is not None:
        raise refusal


def receive_value(sender: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Receive the value that `send_value` sends. Tensors go to `device`, except those that the sender has on a CPU."""
    size = torch.empty(1, dtype=torch.int64, device="cpu")
    dist.recv(size, group_src=sender, group=group)
    data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.recv(data, group_src=sender, group=group)
    head = json.loads(data.numpy().tobytes())
    if "refusal" in head:
        raise PipelineError(head["refusal"])
    layout = layout_of(head["layout"])
    tensors = [*map(empty, tensor_layouts(layout))]
    for tensor in tensors:
        dist.recv(as_sent(tensor), group_src=sender, group=group)
    placed = (t if on_host else t.to(device) for t, on_host in zip(tensors, head["on_host"], strict=True))
    wanting = (t.requires_grad_(wants) for t, (*_, wants) in zip(placed, tensor_layouts(layout), strict=True))
    return unflatten(wanting, layout)
