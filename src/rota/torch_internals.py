"""Everything that Rota uses of PyTorch and that PyTorch does not promise to keep, behind functions with plain names.

Each function says what it relies on. All of it is in PyTorch 2.10, the oldest that Rota supports, unless a function
names a later one. `tests/test_torch_internals.py` has a canary for each function: if one fails after an update
of PyTorch, the change belongs here and nowhere else. This module imports nothing of Rota.
"""

from __future__ import annotations

import hashlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from importlib import import_module
from operator import attrgetter
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten as tree_flatten, tree_iter, tree_map, tree_unflatten as tree_unflatten

# --- autograd's graph -------------------------------------------------------------------------------------------------


def run_backward(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor] = ()
) -> None:
    """`torch.autograd.backward` without its preparations, which cost half of its time; every root needs its gradient.

    `weights`: only those get their gradients, all if there are none. Relies on `Variable._execution_engine`, which
    `torch.autograd.backward` calls. The engine itself compares shapes, dtypes and devices of `gradients` and `roots`.
    """
    _run_engine(
        tuple(roots), tuple(gradients), False, False, tuple(weights), allow_unreachable=True, accumulate_grad=True
    )


def gradients_into(
    edges: Sequence[GradientEdge],
    roots: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor | None],
    *,
    retain_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` without its preparations, for `edges`; None where none arrives. See `run_backward`."""
    arrived: tuple[torch.Tensor | None, ...] = _run_engine(
        tuple(roots), tuple(gradients), retain_graph, False, tuple(edges), True, accumulate_grad=False
    )
    return arrived


_run_engine = torch.autograd.Variable._execution_engine.run_backward


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Its `apply` without what functorch's transforms need. Relies on the base class of `torch.autograd.Function`."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def is_in_backward() -> bool:
    """Whether autograd's engine runs this code: a hook, or a forward that a checkpointed block repeats.

    On accelerators it does so in threads of its own. Relies on `torch._C._current_graph_task_id`.
    """
    return torch._C._current_graph_task_id() != -1


def edges_into(node: Node) -> list[GradientEdge]:
    """One edge per gradient that `node` receives. Relies on the length of `Node._input_metadata`."""
    return [GradientEdge(node, i) for i in range(len(node._input_metadata))]


def runs_as_a_whole(node: Node) -> bool:
    """Whether `node` computes all of its gradients or none, so that its backward must not be split.

    True for a custom `autograd.Function`, for functions of C++ extensions, and for nodes that wrap another node because
    a view was written to. Relies on the names that autograd gives the types of the last two.
    """
    return isinstance(node, BackwardCFunction) or type(node).__name__ in ("CppFunction", "CopySlices")


def is_compiled_function(node: Node) -> bool:
    """Whether `torch.compile` made `node`. Relies on the name that AOTAutograd gives its type."""
    return type(node).__name__ == "CompiledFunctionBackward"


def without_donated_buffers() -> AbstractContextManager[None]:
    """Lets compiled functions run in a graph that is kept, if their backward runs on this thread.

    Relies on `torch._functorch.config.donated_buffer`, a setting per thread.
    """
    from torch._functorch import config  # slow to import, but imported already if a function was compiled

    patch: AbstractContextManager[None] = config.patch(donated_buffer=False)
    return patch


def accumulates_gradient(node: Node) -> bool:
    """Whether `node` adds to the `.grad` of a leaf, which is its `variable`. Relies on that name and on the type."""
    return isinstance(node, _accumulate_grad())


@cache
def _accumulate_grad() -> type:
    return type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


def saved_tensors(node: Node) -> Iterator[torch.Tensor]:
    """What autograd saved for `node`, except what hooks packed. Relies on what `_saved_by` relies on."""
    return (saved.data for saved in _saved_by(node) if isinstance(saved.data, torch.Tensor))


def has_saved_tensor_hooks(node: Node) -> bool:
    """Whether hooks packed saved tensors of `node`, as in a checkpointed block. Relies on `SavedTensor.unpack_hook`."""
    return any(saved.unpack_hook is not None for saved in _saved_by(node))


def has_saved(node: Node) -> bool:
    """Whether nodes of this type can hold tensors. Relies on what `_saved_by` relies on."""
    return bool(_names_of_saved(type(node)))


def first_saved(node: Node) -> str:
    """The name of what autograd saved for `node`, for `is_packed`; "" if it saved nothing. Relies on `_saved_by`."""
    for name in _names_of_saved(type(node)):
        if any(saved.unpack_hook is not None or saved.data is not None for saved in _at(node, name)[:1]):
            return name
    return ""


def is_packed(node: Node, name: str) -> bool:
    """Whether hooks packed what `node` saved by this name: faster than `has_saved_tensor_hooks`, which asks all."""
    saved = _at(node, name)
    return bool(saved) and saved[0].unpack_hook is not None


def release_saved(nodes: Iterable[Node]) -> None:
    """Free the saved tensors of nodes that will not run again, though the graph still exists.

    Relies on `SavedTensor.register_hooks`, which replaces the saved tensor by the hook's result, and detaches it.
    A dispatch mode would see the Python number that a saved scalar is (`x * 0.5`), which has no `detach`, so no mode is
    active meanwhile: `_disable_current_modes`, which takes long, and `_len_torch_dispatch_stack`.
    """
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        for node in nodes:
            for saved in _saved_by(node):
                if saved.unpack_hook is None and saved.data is not None:
                    saved.register_hooks(_forget, _refuse)


def _saved_by(node: Node) -> Iterator[Any]:
    """The node's attributes named `_raw_saved_…`, each a `SavedTensor` or a sequence of them."""
    for name in _names_of_saved(type(node)):
        yield from _at(node, name)


def _at(node: Node, name: str) -> Sequence[Any]:
    saved = getattr(node, name)
    return saved if isinstance(saved, (tuple, list)) else (saved,)


@lru_cache(maxsize=4096)
def _names_of_saved(node_type: type) -> tuple[str, ...]:
    return tuple(name for name in dir(node_type) if name.startswith("_raw_saved_"))


def _forget(tensor: torch.Tensor) -> None:
    del tensor


def _refuse(_: None) -> torch.Tensor:
    raise RuntimeError("this node has run, and its saved tensors were released")


# --- tensors, storages and modules ------------------------------------------------------------------------------------


class _Writable(torch.autograd.Function):
    """Passes on a leaf's memory, and its count of writes."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient


_writable = apply_of(_Writable)


def writable(leaf: torch.Tensor) -> torch.Tensor:
    """The leaf's memory as a tensor that a stage may write into, neither a leaf nor a view; writes count for the leaf.

    Relies on what `detach` returns not being a view for autograd. A leaf without strides (sparse, nested) or of a
    subclass is returned as it is, since autograd refuses writes into it.
    """
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_nested:
        return leaf
    entered: torch.Tensor = _writable(leaf)
    return entered


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was written to in place. Relies on `Tensor._version`."""
    return tensor._version


_VERSION = attrgetter("_version")


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`version_of` each, as fast as Python can."""
    return [*map(_VERSION, tensors)]


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a sparse tensor's numbers, also where it is not coalesced. Relies on `Tensor._values`."""
    return tensor._values()


def norms_of_each(tensors: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each tensor, computed in `dtype`; few kernels for many tensors. Relies on `torch._foreach_norm`."""
    return [*torch._foreach_norm([*tensors], norm_type, dtype=dtype)] if tensors else []


def multiply_each(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply all tensors in place by one number; few kernels for many tensors. Relies on `torch._foreach_mul_`."""
    if tensors:
        torch._foreach_mul_([*tensors], factor)


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target; few kernels for many tensors. Relies on `torch._foreach_copy_`."""
    if targets:
        torch._foreach_copy_([*targets], [*sources])


def zero_each(tensors: Sequence[torch.Tensor]) -> None:
    """Fill all tensors with zeros; few kernels for many tensors. Relies on `torch._foreach_zero_`."""
    if tensors:
        torch._foreach_zero_([*tensors])


def address_of(storage: torch.UntypedStorage) -> int:
    """Identifies a storage while it is alive, also one without memory (meta). Relies on `UntypedStorage._cdata`."""
    address: int = storage._cdata
    return address


@final
class StorageReference:
    """Does not keep a storage alive, but keeps its address from being used again. Relies on `StorageWeakRef`."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)

    @property
    def is_expired(self) -> bool:
        """Whether nothing uses the storage any more."""
        return bool(self._reference.expired())


def tensors_anywhere(value: Any) -> Iterator[torch.Tensor]:
    """All tensors inside a value, such as arguments of an operation or optimizer state, in containers known to PyTorch.

    Relies on `torch.utils._pytree.tree_iter`.
    """
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor))


def over_tensors_anywhere(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The value with each tensor in it changed, as `tensors_anywhere` finds them. Relies on `torch.utils._pytree`."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def writes_to_arguments(operation: Any) -> bool:
    """Whether an ATen operation, as a dispatch mode gets it, writes in place. Relies on `OpOverload._schema`."""
    return bool(operation._schema.is_mutable)


def written_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an ATen operation, as a dispatch mode gets it, writes in place. Relies on `_schema`."""
    written: list[torch.Tensor] = []
    for position, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors_anywhere(args[position] if position < len(args) else kwargs.get(argument.name))
    return written


def name_of(operation: Any) -> str:
    """An ATen operation's name without `aten::` and overload, `mul_`. Relies on `OpOverload._schema`."""
    return str(operation._schema.name.split("::")[1])


def full_name_of(operation: Any) -> str:
    """An operation's name with its namespace, without overload, `aten::mm`. Relies on `OpOverload._schema`."""
    return str(operation._schema.name)


def lacks_data(error: BaseException) -> bool:
    """Whether an operation failed because its tensors have no data, or because PyTorch cannot run it without.

    Relies on the exceptions of fake tensors, and for the meta device, on the words of PyTorch's messages.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    is_of_fake_tensors = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
    return is_of_fake_tensors or _WITHOUT_DATA.search(str(error)) is not None


#: "Cannot copy out of meta tensor", "arguments from the 'Meta' backend", "on meta device"; higher-order operators.
_WITHOUT_DATA = re.compile(
    r"\bmeta'? (tensor|backend|device)|register_meta|unallocated storage|no rule registered for HOP", re.IGNORECASE
)


_IS_NOT_COPIED = (
    r"for (.+): copying from a non-meta parameter in the checkpoint to a meta parameter in the current model, which is "
    r"a no-op"
)


@contextmanager
def copies_to_meta() -> Iterator[list[str]]:
    """Yields the names of the weights that `load_state_dict` does not copy because its module's are on the meta device.

    They replace PyTorch's warning about each of them, which this recognizes by its text.
    """
    names: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("always", _IS_NOT_COPIED, UserWarning)
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **how: Any) -> None:
            if match := re.match(_IS_NOT_COPIED, str(message)):
                names.append(match[1])
            else:
                show_other(message, category, *where, **how)

        warnings.showwarning = show
        yield names


def own_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers by name that `state_dict` takes from `module` itself, not from its children.

    Relies on `Module._non_persistent_buffers_set`.
    """
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


#: As `__torch_function__` of a tensor subclass: its operations reach `__torch_dispatch__` alone.
WITHOUT_TORCH_FUNCTION = torch._C._disabled_torch_function_impl

#: The product of several matrices with slices of another, as `torch.nn.functional.grouped_mm` calls it.
GROUPED_MM = torch.ops.aten._grouped_mm.default


def compile_alike(original: nn.Module, copied: nn.Module) -> None:
    """Compile `copied` and the modules in it with the options with which those of `original` were compiled.

    Relies on `Module._compiled_call_impl`, `Module._call_impl`, and on the closure of what `torch.compile` returns.
    """
    for module, twin in zip(original.modules(), copied.modules(), strict=True):
        if module._compiled_call_impl is not None:
            twin._compiled_call_impl = _compiler_of(module._compiled_call_impl)(twin._call_impl)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether a module runs compiled, by `Module.compile` or `torch.compile`.

    Relies on `Module._compiled_call_impl`, and on `OptimizedModule`, which exists once something was compiled.
    """
    if module._compiled_call_impl is not None:
        return True
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def run_uncompiled() -> AbstractContextManager[Any]:
    """Inside, compiled functions and modules run as they are written; nothing is loaded if nothing was compiled.

    Relies on `torch.compile` loading `torch._dynamo`, and on `torch.compiler.set_stance`.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _compiler_of(compiled: Any) -> Callable[..., Any]:
    from torch._dynamo.eval_frame import _TorchDynamoContext  # it is loaded by now

    contents = (cell.cell_contents for cell in compiled.__closure__ or ())
    return next((content for content in contents if isinstance(content, _TorchDynamoContext)), torch.compile)


#: The kernels of `scaled_dot_product_attention`: from (query, key, value, …) to a tuple whose first item is the output.
#: Relies on these names in `torch.ops.aten`, and on their arguments as in PyTorch 2.13.
FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
FLASH_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_ATTENTION_ON_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
#: What asks a tensor for its number.
ITEM = torch.ops.aten._local_scalar_dense.default
EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention
#: Those of devices that bring their own kernels.
FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
FUSED_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward

# --- devices ----------------------------------------------------------------------------------------------------------


def sleep_kernel(device: torch.device) -> Callable[[int], None] | None:
    """A function that enqueues a kernel on the current stream, which lasts so many ticks of the device's clock.

    None if PyTorch has no such kernel for the device. Relies on `torch.cuda._sleep`, which CUDA and ROCm have.
    """
    kernel: Callable[[int], None] | None = getattr(torch.get_device_module(device), "_sleep", None)
    return kernel


# --- process groups and FSDP ------------------------------------------------------------------------------------------


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend for tensors on `device`; the group itself if it is written in Python.

    Its `send`, `recv` and `allreduce` skip what `torch.distributed` checks per call. Relies on
    `ProcessGroup._get_backend`, `send(tensors, peer, tag)`, `recv(tensors, peer, tag)` and
    `allreduce(tensors, options)`.
    """
    return group if type(group) is not dist.ProcessGroup else group._get_backend(device)


def message_options(sender: int) -> Any:
    """For `move_message`: `sender` is the rank in the two-rank group from which the message goes to the other one."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = sender, 0, False
    return options


def move_message(backend: Any, tensor: torch.Tensor, options: Any) -> None:
    """Move a contiguous tensor between the two ranks of a group, on the current stream. Both ranks call it.

    It is a broadcast, not a send and a receive. NCCL's backend runs those on a stream of its own, and marks their
    tensors by `record_stream`: memory that is freed then waits for all messages that the host has enqueued by that
    time, so that a step would reuse none of it (pytorch/pytorch#132292). A broadcast that is not asynchronous runs on
    the current stream, and marks nothing.

    Relies on `broadcast(tensors, options)` of a backend and on `BroadcastOptions.asyncOp`.
    """
    if tensor.dtype not in _TAKEN_BY_ALL:
        tensor = tensor.reshape(-1).view(torch.uint8)
    work = backend.broadcast([tensor], options)
    if work is not None:
        work.wait()


#: The dtypes that every backend moves. NCCL knows no int16 and no uint16 to 64, and float8 on new devices alone.
_TAKEN_BY_ALL = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32))
_TAKEN_BY_ALL |= {torch.int8, torch.uint8, torch.bool}


def new_group(processes: Iterable[int], timeout: Any, backend: str, num_ctas: int | None = None) -> dist.ProcessGroup:
    """A new group of these processes. They alone make it; all make those that they are in in one order.

    PyTorch names such a group by how many groups a process is in, so that those that are in different numbers of them
    would wait for each other for ever (2.13). Here the processes and the number of their groups name it. And where a
    device is bound to the default group, PyTorch would split that group's communicator, for which all processes must
    call. `num_ctas`: the most CTAs of NCCL's kernels. Relies on `use_local_synchronization`, `_process_group_name`,
    `_get_default_store` and `ProcessGroup.bound_device_id`.
    """
    c10d: Any = dist.distributed_c10d
    members = sorted(processes)
    world: Any = c10d._get_default_group()
    number = c10d._get_default_store().add(f"rota/groups of {members} on {world.rank()}", 1)
    name = hashlib.sha1(f"{members} {number}".encode(), usedforsecurity=False).hexdigest()
    before = c10d._process_group_name, world.bound_device_id
    c10d._process_group_name, world.bound_device_id = (lambda *_, **__: name), None
    try:
        options = group_options(backend, timeout, num_ctas)
        group: dist.ProcessGroup = dist.new_group(members, timeout, backend, options, use_local_synchronization=True)
        return group
    finally:
        c10d._process_group_name, world.bound_device_id = before


def group_options(backend: str, timeout: Any, num_ctas: int | None) -> Any:
    """What `new_group` takes, so that the kernels of NCCL have at most so many CTAs; None for another backend.

    Relies on `ProcessGroupNCCL.Options._timeout`, which must be that of the group (a timedelta).
    """
    if backend != "nccl" or num_ctas is None:
        return None
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas, options._timeout = num_ctas, timeout
    return options


def own_connection_to_store() -> Any:
    """A new connection to the store of the default process group. Relies on `_get_default_store` and `Store.clone`."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def set_default_timeout(timeout: Any) -> None:
    """Change the limit (a timedelta) of the default process group.

    Relies on `_set_pg_timeout` before PyTorch 2.15, which has a public function for it.
    """
    public: Any = getattr(dist, "set_timeout", None)
    (public or dist.distributed_c10d._set_pg_timeout)(timeout)


def replace_rendezvous(scheme: str, handler: Callable[..., Any]) -> None:
    """Make `handler` handle a scheme such as "env". Relies on `torch.distributed.rendezvous._rendezvous_handlers`.

    The public way adds handlers under new names only.
    """
    handlers: dict[str, Any] = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers[scheme] = handler


def reduce_sharded_gradients(root: Any) -> None:
    """Reduce the gradients of an FSDP2 module now, as its last backward would.

    Relies on `FSDPState._root_post_backward_final_callback`, which `torch.distributed.pipelining` calls as well.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


def unreduced_parameters(module: Any) -> list[nn.Parameter]:
    """An FSDP2 module's own parameters with gradients that FSDP has not reduced yet: they are not in `.grad`.

    Relies on `FSDPState._fsdp_param_group`, and on `sharded_param`, `_unsharded_param` and `unsharded_accumulated_grad`
    of its `fsdp_params`. The last one is a gradient of another dtype than the weight, see `MixedPrecisionPolicy`.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    unreduced = []
    for parameter in group.fsdp_params if group is not None else ():
        whole = getattr(parameter, "_unsharded_param", None)  # it is made in the first forward
        if parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
            unreduced.append(parameter.sharded_param)
    return unreduced


# --- torch.distributed.pipelining -------------------------------------------------------------------------------------


def derive_communication(
    rows: Sequence[Sequence[str]], num_stages: int, num_microbatches: int, defers_receives: bool
) -> list[list[str]]:
    """The cells with the communication that PyTorch's engine derives for these; AssertionError if it refuses them.

    Relies on `_PipelineScheduleRuntime._prepare_schedule_with_comms` and the attributes that it reads, of PyTorch 2.13
    and 2.15. From 2.15 on, the waits of `_with_waits` are among them, and are left out here.
    """
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    schedule: Any = _PipelineScheduleRuntime.__new__(_PipelineScheduleRuntime)  # one that runs needs a process group
    schedule.pp_group_size, schedule._num_stages, schedule._n_microbatches = len(rows), num_stages, num_microbatches
    schedule._stages, schedule._defer_pp_recv = [], defers_receives
    schedule._max_active_stages, schedule._unshard_lookahead = 3, "full"
    schedule._defer_reduce_grad_wait, schedule._max_outstanding_sends = False, None
    schedule._prepare_schedule_with_comms({r: [_Action.from_str(cell) for cell in row] for r, row in enumerate(rows)})
    order = schedule.pipeline_order_with_comms
    return [[str(a) for a in order[r] if not a.computation_type.name.startswith("WAIT_")] for r in range(len(rows))]


def new_schedule(
    stages: Sequence[Any], num_microbatches: int, loss_fn: Callable[..., Any] | None, **options: Any
) -> Any:
    """PyTorch's runtime of schedules, without a schedule. Relies on `_PipelineScheduleRuntime`."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    make: Any = _PipelineScheduleRuntime
    return make([*stages], num_microbatches, loss_fn=loss_fn, **options)


def takes_communication(schedule: Any) -> bool:
    """Whether a schedule of PyTorch's runs cells with communication. Relies on `_PipelineScheduleRuntime`."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    return isinstance(schedule, _PipelineScheduleRuntime)


def stages_of(schedule: Any) -> list[Any]:
    """This rank's stages of a schedule with several. Relies on `PipelineScheduleMulti._stages`."""
    return list(schedule._stages)


def num_microbatches_of(schedule: Any) -> int:
    """The number of micro-batches of a schedule. Relies on `_PipelineSchedule._n_microbatches`."""
    return int(schedule._n_microbatches)


def load_communication(schedule: Any, rows: Sequence[Sequence[str]]) -> None:
    """Let a schedule run these cells, and unshard and reshard FSDP's stages as PyTorch does for cells without any.

    Relies on `_prepare_schedule_with_comms(…, format="compute_comms")`, which changes nothing, and on
    `_add_unshard_reshard`, which is for compute alone.
    """
    from torch.distributed.pipelining.schedules import _Action

    actions = {r: _sharding_aware([_Action.from_str(cell) for cell in row]) for r, row in enumerate(rows)}
    schedule._prepare_schedule_with_comms(_with_waits(actions), format="compute_comms")


def _with_waits(actions: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
    """The actions with the waits that PyTorch 2.15 and later ask for: for each send, and for each reduction at once.

    Relies on `_add_wait_send` and `_ComputationType.WAIT_REDUCE_GRAD`, which older versions lack.
    """
    from torch.distributed.pipelining import schedules

    kinds: Any = schedules._ComputationType
    add_wait_send: Any = getattr(schedules, "_add_wait_send", None)
    if add_wait_send is None:
        return {rank: list(row) for rank, row in actions.items()}
    waited: dict[int, list[Any]] = {}
    for rank, row in actions.items():
        waited[rank] = []
        for action in row:
            waited[rank].append(action)
            if action.computation_type == kinds.REDUCE_GRAD:
                waited[rank].append(action._replace(computation_type=kinds.WAIT_REDUCE_GRAD))
    return dict(add_wait_send(waited))


def _sharding_aware(actions: Sequence[Any]) -> list[Any]:
    """The actions with UNSHARD and RESHARD before the same ops as PyTorch's, if they have none."""
    from torch.distributed.pipelining.schedules import UNSHARD, _add_unshard_reshard

    if any(action.computation_type == UNSHARD for action in actions):
        return list(actions)
    before: list[list[Any]] = [[]]  # each op, and at last behind all of them
    for action in _add_unshard_reshard([action for action in actions if action.is_compute_op]):
        if action.is_compute_op:
            before.append([])
        else:
            before[-1].append(action)
    changes, result = iter(before), []
    for action in actions:
        result += [*(next(changes) if action.is_compute_op else ()), action]
    return [*result, *next(changes)]
