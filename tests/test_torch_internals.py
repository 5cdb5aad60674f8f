"""One canary for each thing that Rota relies on and PyTorch does not promise: a failure names what has changed."""

import ast
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge

import rota
from rota import torch_internals
from support.pool import on_ranks


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a PyTorch with NCCL")
def test_kernels_of_nccl_can_be_limited() -> None:
    options = torch_internals.group_options("nccl", timedelta(seconds=7), 3)
    assert (options.config.max_ctas, options._timeout) == (3, timedelta(seconds=7))


def test_groups_of_other_backends_have_no_limit() -> None:
    assert torch_internals.group_options("gloo", timedelta(seconds=7), 3) is None
    assert torch_internals.group_options("nccl", timedelta(seconds=7), None) is None


def test_run_backward_accumulates_like_autograd() -> None:
    weight = torch.ones(3, requires_grad=True)
    for _ in range(2):
        torch_internals.run_backward([get_gradient_edge(2 * weight)], [torch.ones(3)])
    assert weight.grad.tolist() == [4, 4, 4]


def test_a_node_has_one_edge_per_output() -> None:
    first, second = torch.ones(4, requires_grad=True).mul(1).split(2)
    assert len(torch_internals.edges_into(get_gradient_edge(first).node)) == 2
    assert get_gradient_edge(second).output_nr == 1


def test_many_tensors_are_copied_between_dtypes_and_zeroed_at_once() -> None:
    targets = [torch.ones(2, dtype=torch.float64), torch.ones((), dtype=torch.float64)]
    torch_internals.copy_each(targets, [torch.full((2,), 3.0), torch.tensor(4.0)])
    torch_internals.zero_each(targets[1:])
    assert [target.tolist() for target in targets] == [[3.0, 3.0], 0.0]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_a_custom_function_runs_as_a_whole() -> None:
    x = torch.ones(2, requires_grad=True)
    custom, plain = get_gradient_edge(_Doubled.apply(x)).node, get_gradient_edge(x * 2).node
    assert torch_internals.runs_as_a_whole(custom)
    assert not torch_internals.runs_as_a_whole(plain)


def test_a_view_that_was_written_to_runs_as_a_whole() -> None:
    base = torch.ones(4, requires_grad=True) * 1
    base[:2].mul_(torch.full((2,), 3.0, requires_grad=True))
    assert torch_internals.runs_as_a_whole(get_gradient_edge(base).node)


def test_nodes_that_accumulate_are_known_and_name_their_leaf() -> None:
    leaf = torch.ones(2, requires_grad=True)
    node: Any = get_gradient_edge(leaf).node
    assert torch_internals.accumulates_gradient(node)
    assert node.variable is leaf
    assert not torch_internals.accumulates_gradient(get_gradient_edge(leaf * 2).node)


def test_what_is_saved_is_found_and_can_be_released() -> None:
    made = torch.ones(1000, requires_grad=True).mul(2.0).exp()
    node = get_gradient_edge(made).node
    (saved,) = torch_internals.saved_tensors(node)
    assert saved.shape == made.shape
    torch_internals.release_saved([node])
    with pytest.raises(RuntimeError, match="were released"):
        made.sum().backward()


def test_saved_numbers_are_released_under_a_dispatch_mode() -> None:
    class Mode(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        made = torch.ones(2, requires_grad=True) * 0.5
        torch_internals.release_saved([get_gradient_edge(made).node])


def test_hooks_that_pack_what_is_saved_are_seen() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        packed = x.exp()
    for made, is_packed in ((packed, True), (x.exp(), False)):
        node = get_gradient_edge(made).node
        assert torch_internals.has_saved_tensor_hooks(node) is is_packed
        assert torch_internals.is_packed(node, torch_internals.first_saved(node)) is is_packed
    assert not torch_internals.first_saved(get_gradient_edge(x + x).node)


def test_compiled_modules_are_known() -> None:
    in_place, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    in_place.compile(backend="eager")
    assert torch_internals.is_compiled_module(in_place)
    assert torch_internals.is_compiled_module(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert not torch_internals.is_compiled_module(plain)


def test_compiled_functions_run_as_they_are_written() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(inputs)
        return graph.forward

    double = torch.compile(lambda t: t * 2, backend=backend)
    with torch_internals.run_uncompiled():
        assert double(torch.ones(1)).item() == 2
    assert not compiled
    double(torch.ones(1))
    assert compiled


def test_compiled_functions_are_known_and_run_in_a_graph_that_is_kept() -> None:
    x = torch.ones(2, requires_grad=True)
    made = torch.compile(lambda t: (t.exp() * t).sin(), backend="aot_eager")(x)
    assert torch_internals.is_compiled_function(get_gradient_edge(made).node)
    assert not torch_internals.is_compiled_function(get_gradient_edge(x.exp()).node)
    with torch_internals.without_donated_buffers():
        from torch._functorch import config

        assert not config.donated_buffer
    assert config.donated_buffer


def test_a_leaf_can_be_written_into_as_writable() -> None:
    leaf = torch.ones(3, requires_grad=True)
    entered = torch_internals.writable(leaf)
    assert entered.data_ptr() == leaf.data_ptr()
    assert not entered._is_view()
    entered.mul_(2).sum().backward()
    assert leaf.tolist() == [2, 2, 2]
    assert leaf._version == 1
    assert leaf.grad.tolist() == [2, 2, 2]


def test_a_modules_own_state_is_what_its_state_dict_has() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    module.child = nn.Linear(1, 1)
    names = [name for name, _ in torch_internals.own_state(module)]
    assert names == [name for name in module.state_dict() if "." not in name]


def test_attention_has_the_kernels_that_are_called_by_name() -> None:
    query = torch.ones(1, 1, 4, 8)
    expected = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    made = torch_internals.FLASH_ATTENTION_ON_CPU(query, query, query, 0.0, True, attn_mask=None, scale=None)[0]
    assert torch.allclose(made, expected)
    meta = query.to("meta", torch.bfloat16)
    assert torch_internals.FLASH_ATTENTION(meta, meta, meta, 0.0, True, scale=None)[0].shape == query.shape
    assert (
        torch_internals.EFFICIENT_ATTENTION(meta, meta, meta, None, True, 0.0, True, scale=None)[0].shape == query.shape
    )


def test_storages_are_told_apart_also_on_meta() -> None:
    for device in ("cpu", "meta"):
        one, other = torch.empty(4, device=device), torch.empty(4, device=device)
        address = torch_internals.address_of(one.untyped_storage())
        assert address == torch_internals.address_of(one[1:].untyped_storage())
        assert address != torch_internals.address_of(other.untyped_storage())


def test_operations_that_write_are_known() -> None:
    seen = {}

    class Mode(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[func.overloadpacket] = torch_internals.writes_to_arguments(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2).add_(1).add(1)
    assert seen[torch.ops.aten.add_]
    assert not seen[torch.ops.aten.add]


@pytest.mark.parametrize(
    "ask", [torch.nonzero, torch.unique, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy]
)
def test_errors_for_lack_of_data_are_known_on_the_meta_device(ask: Any) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        ask(torch.empty(1, device="meta"))
    assert torch_internals.lacks_data(caught.value)
    assert not torch_internals.lacks_data(NotImplementedError("only for pairs"))


@pytest.mark.parametrize("ask", [torch.nonzero, torch.Tensor.item])
def test_errors_for_lack_of_data_are_known_of_fake_tensors(ask: Any) -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError) as caught:
        ask(torch.empty(1))
    assert torch_internals.lacks_data(caught.value)


def test_weights_that_are_not_copied_to_the_meta_device_are_named() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    weights = nn.Linear(2, 2).state_dict()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with torch_internals.copies_to_meta() as names:
            model.load_state_dict(weights)
            warnings.warn("another", stacklevel=1)
        model.load_state_dict(weights)
    assert names == ["weight", "bias"]
    assert [str(one.message).partition(":")[0] for one in told] == ["another", "for weight", "for bias"]


def test_arguments_that_are_written_are_known() -> None:
    aten, x, out = torch.ops.aten, torch.ones(2), torch.ones(2)
    assert torch_internals.written_arguments(aten.mul_.Tensor, (x, out), {})[0] is x
    assert torch_internals.written_arguments(aten.add.out, (x, x), {"out": out})[0] is out
    assert torch_internals.written_arguments(aten.add.Tensor, (x, x), {}) == []


def test_the_backend_for_cpu_tensors_reduces(alone: dist.ProcessGroup) -> None:
    tensor = torch.ones(2)
    torch_internals.backend_of(alone, torch.device("cpu")).allreduce([tensor], dist.AllreduceOptions()).wait()
    assert tensor.tolist() == [1, 1]


def test_a_message_moves_on_the_current_stream(alone: dist.ProcessGroup) -> None:
    options = torch_internals.message_options(0)
    assert (options.rootRank, options.asyncOp) == (0, False)
    for tensor in (torch.ones(2), torch.ones(2).to(torch.float8_e4m3fn)):
        torch_internals.move_message(torch_internals.backend_of(alone, torch.device("cpu")), tensor, options)
        assert tensor.float().tolist() == [1, 1]


#: Gloo's broadcast refuses these too.
UNKNOWN_TO_NCCL = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn)


@on_ranks(2)
def test_a_message_may_have_any_dtype(rank: int) -> None:
    backend, tensors = torch_internals.backend_of(dist.group.WORLD, torch.device("cpu")), []  # type: ignore[arg-type]
    for dtype in UNKNOWN_TO_NCCL:
        tensors.append(torch.tensor(rank).to(dtype))
        torch_internals.move_message(backend, tensors[-1], torch_internals.message_options(1))
    assert [tensor.float().item() for tensor in tensors] == [1] * len(UNKNOWN_TO_NCCL)


@on_ranks(3)
def test_a_group_is_made_by_its_members_alone(rank: int) -> None:
    """The sum of ranks in each of a rank's groups, the middle one of which has more than the others."""
    sums = []
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # type: ignore[union-attr]
    for members, factor in (((0, 1), 1), ((1, 2), 1), ((1, 0), 2), ((1, 2), 2)):
        if rank in members:
            total = torch.tensor(rank * factor)
            dist.all_reduce(total, group=torch_internals.new_group(members, timedelta(seconds=100), "gloo"))
            sums.append(int(total))
    assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)  # type: ignore[union-attr]
    dist.group.WORLD.bound_device_id = None  # type: ignore[union-attr]
    assert sums == [[1, 2], [1, 3, 2, 6], [3, 6]][rank]


def test_a_hook_of_a_backward_is_in_it() -> None:
    found = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: found.append(torch_internals.is_in_backward()))
    (2 * x).backward()
    assert (found, torch_internals.is_in_backward()) == ([True], False)


def test_a_connection_of_ones_own_reaches_the_store(alone: dist.ProcessGroup) -> None:
    torch_internals.own_connection_to_store().set("key", "value")
    assert torch_internals.own_connection_to_store().get("key") == b"value"


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_sharded_gradients_are_kept_until_they_are_reduced(
    alone: dist.ProcessGroup, reduce_dtype: torch.dtype | None
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    module: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    module.bias.requires_grad_(False)
    assert torch_internals.unreduced_parameters(module) == []
    module.set_is_last_backward(False)
    module.set_requires_gradient_sync(False)
    module(torch.ones(1, 2)).sum().backward()
    module.reshard()
    assert module.weight.grad is None
    (kept,) = torch_internals.unreduced_parameters(module)
    assert kept is module.weight
    module.set_is_last_backward(True)
    module.set_requires_gradient_sync(True)
    torch_internals.reduce_sharded_gradients(module)
    assert module.weight.grad is not None
    assert torch_internals.unreduced_parameters(module) == []


def test_the_default_limit_of_a_process_group_can_be_changed(alone: dist.ProcessGroup) -> None:
    torch_internals.set_default_timeout(timedelta(seconds=123))
    backend = torch_internals.backend_of(alone, torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=123)


def test_a_rendezvous_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(module, "_rendezvous_handlers", {**module._rendezvous_handlers})
    torch_internals.replace_rendezvous("env", lambda url, **_: iter([url]))
    assert next(dist.rendezvous("env://x")) == "env://x"


def test_pipelining_derives_communication() -> None:
    derive = torch_internals.derive_communication
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    early, late = (derive(rows, 2, 2, defers) for defers in (False, True))
    both_ways = "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD"
    assert ",".join(early[0]) == both_ways
    assert ",".join(early[1]).startswith("1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0")
    assert ",".join(late[1]).startswith("1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1")
    with pytest.raises(AssertionError, match="expected 3"):
        derive(rows, 2, 3, False)


def test_pipelining_loads_communication_and_unshards_before_the_same_ops(alone: dist.ProcessGroup) -> None:
    from torch.distributed.pipelining import PipelineStage

    stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"), group=alone)
    schedule = torch_internals.new_schedule([stage], 2, None, scale_grads=False)
    assert torch_internals.takes_communication(schedule)
    assert not torch_internals.takes_communication(stage)
    assert torch_internals.stages_of(schedule) == [stage]
    assert torch_internals.num_microbatches_of(schedule) == 2
    cells = ["0F0", "0F1", "0B1", "0B0", "0REDUCE_GRAD"]
    for row in (cells, ["0UNSHARD", *cells, "0RESHARD"]):
        torch_internals.load_communication(schedule, [row])
        loaded = list(map(str, schedule.pipeline_order_with_comms[0]))
        assert [cell for cell in loaded if "WAIT" not in cell] == ["0UNSHARD", *cells, "0RESHARD"]


_PACKAGE = Path(rota.__file__).parent
_HOME = _PACKAGE / "torch_internals.py"
_ATTRIBUTES = {
    *("_cdata", "_fsdp_param_group", "_get_backend", "_get_default_store", "_get_fsdp_state"),
    *("_input_metadata", "_is_view", "_n_microbatches", "_post_accumulate_grad_hooks", "_rendezvous_handlers"),
    *("_root_post_backward_final_callback", "_schema", "_set_pg_timeout", "_stage", "_step_microbatches"),
    *("_unsafe_view", "_unsharded_param", "_values", "_version", "unpack_hook"),
}
_TYPES = {
    *("BackwardCFunction", "CppFunction", "CopySlices", "AccumulateGrad"),
    *("CompiledFunctionBackward", "StorageWeakRef", "_raw_saved_"),
}


def private_uses(source: str) -> list[str]:
    """What of PyTorch's private names a module uses."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            paths = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                paths = [f"{node.module}.{name}" for name in paths]
            private = (p for p in paths if p.startswith("torch.") and ("._" in p or p.split(".")[-1] in _TYPES))
            found += [path for path in private if not path.startswith("torch.__")]
        elif isinstance(node, ast.Attribute):
            is_private = node.attr[0] == "_" and node.attr[:2] != "__"
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if (node.attr in _ATTRIBUTES and not is_own) or (
                is_private and ast.unparse(node).startswith(("torch.", "dist."))
            ):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Constant) and node.value in _TYPES:
            found.append(str(node.value))
    return found


def test_private_names_are_used_in_one_place() -> None:
    assert private_uses(_HOME.read_text())
    others = (path for path in sorted(_PACKAGE.rglob("*.py")) if path != _HOME)
    assert {str(path): uses for path in others if (uses := private_uses(path.read_text()))} == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and there is none here")
def test_a_kernel_that_sleeps_lasts_as_many_ticks() -> None:
    sleep = torch_internals.sleep_kernel(torch.device("cuda"))

    def lasts_ms(ticks: int) -> float:
        events = [torch.Event("cuda", enable_timing=True) for _ in range(2)]
        sleep(ticks)
        events[0].record()
        sleep(ticks)
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1])

    lasts_ms(10_000_000)
    assert 1.5 < lasts_ms(20_000_000) / lasts_ms(10_000_000) < 2.5
