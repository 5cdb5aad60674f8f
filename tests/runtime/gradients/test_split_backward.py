"""I and W together give what one backward gives, for any stage; each does its part once, and I frees what it can."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rota.models import Stages
from rota.runtime.gradients.forward_backward import Kept, StageForward, backward, backward_inputs, keep_loss
from rota.runtime.gradients.split_backward import Split, WeightWork
from rota.runtime.messages import flatten, over_tensors
from support.odd_stages import IN_PLACE, ROWS, STAGES, WIDTH, Calls, Counted, linear, weight


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return STAGES[name]().double()


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def random_like(value: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors = [t for t in flatten(value, "")[0] if t.requires_grad]
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors]


def middle_stage(module: nn.Module) -> Stages:
    """`module` as the second of three stages."""
    return Stages([nn.Identity(), module, nn.Identity()])


def split(module: nn.Module, *received: Any) -> tuple[Kept, WeightWork, list[Tensor], dict[str, Tensor]]:
    """I alone: what is kept, the work for W, the gradients of what was received, and the weights' so far."""
    torch.manual_seed(7)
    _, (value,), kept = StageForward(middle_stage(module), 1, split=True)([*received], None)
    gradients = random_like(value)
    del value
    (of_inputs,), work = backward_inputs(kept, [gradients])
    return kept, work, of_inputs, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def whole(module: nn.Module, received: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The gradients of the received value and of the weights by one backward of autograd's own."""
    torch.manual_seed(7)
    # Times one: a leaf must not be written into.
    output = module(over_tensors(lambda t: t * 1 if t.requires_grad else t, received))
    roots = [t for t in flatten(output, "")[0] if t.requires_grad]
    if roots:
        torch.autograd.backward(roots, random_like(output))
    leaves = [t for t in flatten(received, "")[0] if t.requires_grad]
    return [leaf.grad for leaf in leaves], gradients_of(module)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def received_tensor(wants_gradient: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).requires_grad_(wants_gradient)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler's own
@pytest.mark.parametrize("wants_gradient", [True, False])
@pytest.mark.parametrize("name", STAGES)
def test_both_halves_are_the_whole(name: str, wants_gradient: bool) -> None:
    module = make(name)
    expected_inputs, expected = whole(module, received_tensor(wants_gradient))
    for _ in range(2):
        _, work, of_inputs, at_once = split(module, received_tensor(wants_gradient))
        assert_same(of_inputs, expected_inputs)
        if not wants_gradient:
            assert not at_once
        work.run()
        assert work.parts == []
        assert_same(gradients_of(module), expected)


@pytest.mark.parametrize("wants_gradient", [True, False])
@pytest.mark.parametrize("name", [name for name in STAGES if "compiled" not in name])
def test_one_backward_is_the_whole(name: str, wants_gradient: bool) -> None:
    module = make(name)
    expected_inputs, expected = whole(module, received_tensor(wants_gradient))
    for _ in range(2):
        torch.manual_seed(7)
        _, (value,), kept = StageForward(middle_stage(module), 1)([received_tensor(wants_gradient)], None)
        (of_inputs,) = backward(kept, [random_like(value)])
        assert_same((of_inputs, gradients_of(module)), (expected_inputs, expected))


@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_writing_into_what_is_received_copies_nothing_and_is_counted(name: str, split: bool) -> None:
    received = received_tensor()
    start, version = received.detach().clone(), received._version
    seen = []

    def write(stage: nn.Module, x: Tensor) -> Tensor:
        seen.append(x.data_ptr())
        return IN_PLACE[name](x)

    StageForward(middle_stage(Calls(write)), 1, split=split)([received], None)
    assert seen == [received.data_ptr()]
    assert not torch.equal(received, start)
    assert received._version > version
    version = received._version
    StageForward(middle_stage(Calls(lambda _, x: x * 2)), 1, split=split)([received], None)
    assert received._version == version


def test_a_sparse_value_between_stages_of_one_rank() -> None:
    product = Calls(lambda s, x: torch.sparse.mm(x, s.w), w=weight(4, 2)).double()
    stages = Stages([nn.Identity(), product])
    dense = torch.tensor([[0, 1.5, 0, 2], [3, 0, 0, 0]], dtype=torch.float64)
    leaf = dense.to_sparse().requires_grad_()
    output, _, kept = StageForward(stages, 1)([leaf], None)
    keep_loss(kept, output.square().sum(), 1.0)
    ((gradient,),) = backward(kept, [])
    expected = dense.clone().requires_grad_()
    torch.autograd.backward((expected @ product.w.detach()).square().sum())
    there = dense != 0
    torch.testing.assert_close(gradient.to_dense()[there], expected.grad[there], rtol=1e-12, atol=1e-12)
    assert leaf._version == 0


@pytest.mark.parametrize(("wants_gradient", "done_by_inputs"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("name", ["custom function", "custom function in a branch"])
def test_a_custom_function_runs_once(name: str, wants_gradient: bool, done_by_inputs: int) -> None:
    module = make(name)
    Counted.backwards = 0
    _, work, _, at_once = split(module, received_tensor(wants_gradient))
    in_branch = name.endswith("branch")
    assert Counted.backwards == (0 if in_branch else done_by_inputs)
    assert ("w" in at_once) == bool(Counted.backwards)
    work.run()
    assert Counted.backwards == 1


@pytest.mark.parametrize("wants_gradient", [True, False])
def test_a_checkpointed_block_is_recomputed_once(wants_gradient: bool) -> None:
    module = make("checkpointed")
    calls = []
    module.block.register_forward_pre_hook(lambda *_: calls.append(1))  # type: ignore[union-attr, operator]
    _, work, _, at_once = split(module, received_tensor(wants_gradient))
    assert len(calls) == (2 if wants_gradient else 1)
    assert any(name.startswith("block") for name in at_once) == wants_gradient
    assert not any(name.startswith("last") for name in at_once)
    work.run()
    assert len(calls) == 2


def test_a_block_that_is_checkpointed_for_some_microbatches_only() -> None:
    """The graphs have one shape, with hooks or without."""
    module, calls, splits = make("checkpointed"), [], list[Split]()
    module.block.register_forward_pre_hook(lambda *_: calls.append(1))  # type: ignore[union-attr, operator]
    plain = Calls(lambda _, x: module.last(module.block(x)))  # type: ignore[operator]
    for stage, num_calls in ((plain, 1), (module, 2), (plain, 1)):
        calls.clear()
        _, (value,), kept = StageForward(middle_stage(stage), 1, split=True)([received_tensor()], None)
        _, work = backward_inputs(kept, [random_like(value)], splits)
        at_once = {name for name, p in module.named_parameters() if p.grad is not None}
        work.run()
        assert len(calls) == num_calls
        assert bool(at_once) == (num_calls == 2)
        module.zero_grad()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler's own
def test_a_compiled_block_may_reuse_its_buffers() -> None:
    """Once its backward is compiled for a graph that is not kept, a compiled block refuses one that is."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    block = Calls(lambda s, x: s.b(functional.gelu(s.a(s.norm(x)))), norm=nn.LayerNorm(WIDTH), a=linear(), b=linear())
    module = nn.Sequential(linear(), block, linear()).double()
    expected_inputs, expected = whole(module, received_tensor())
    block.compile(backend="aot_eager")
    assert_same(whole(module, received_tensor()), (expected_inputs, expected))
    for _ in range(2):
        _, work, of_inputs, at_once = split(module, received_tensor())
        assert {name.partition(".")[0] for name in at_once} == {"1"}
        work.run()
        assert_same((of_inputs, gradients_of(module)), (expected_inputs, expected))


@pytest.mark.parametrize(
    "name", ["layers", "residual", "attention", "low-rank adapter", "normed weight", "recurrent layer"]
)
def test_all_weights_wait_where_nothing_forbids_it(name: str) -> None:
    _, work, _, at_once = split(make(name), received_tensor())
    assert not at_once
    assert work.parts


def test_only_what_shares_a_weight_does_not_wait() -> None:
    torch.manual_seed(3)
    shared = linear()
    module = nn.Sequential(linear(), shared, nn.Tanh(), shared, linear()).double()
    _, work, _, at_once = split(module, received_tensor())
    assert {*at_once} == {"1.weight", "1.bias"}
    assert len(work.parts) == 2


def test_reentrant_checkpoint_is_told() -> None:
    module = Calls(lambda s, x: checkpoint(s.a, x, use_reentrant=True), a=linear()).double()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        split(module, received_tensor())


class Watch(nn.Module):
    """Passes on, and notes the storage that passes."""

    def __init__(self, seen: dict[str, StorageWeakRef], name: str) -> None:
        super().__init__()
        self.seen, self.name = seen, name

    def forward(self, x: Tensor) -> Tensor:
        self.seen[self.name] = StorageWeakRef(x.untyped_storage())
        return x


def test_inputs_let_go_of_what_weights_do_not_need() -> None:
    seen: dict[str, StorageWeakRef] = {}
    names = iter("abcdef")
    layers = [nn.Tanh(), linear(), nn.GELU(), linear(), nn.Softmax(1), nn.Tanh()]
    module = nn.Sequential(*[part for layer in layers for part in (layer, Watch(seen, next(names)))]).double()
    received = received_tensor()
    seen["received"] = StorageWeakRef(received.untyped_storage())
    _, (value,), kept = StageForward(middle_stage(module), 1, split=True)([received], None)
    gradients = random_like(value)
    del received, value

    def alive() -> set[str]:
        return {name for name, storage in seen.items() if not storage.expired()}

    # Tanh and softmax save their outputs, linear and GELU their inputs.
    assert alive() == {"a", "b", "c", "e", "f"}
    _, work = backward_inputs(kept, [gradients])
    del kept
    assert alive() == {"a", "c"}
    work.run()
    assert alive() == set()


def test_inputs_let_go_of_what_they_computed_as_a_whole() -> None:
    seen: dict[str, StorageWeakRef] = {}
    module = Calls(
        lambda s, x: s.b(torch.tanh(Counted.apply(s.watch(s.a(x)), s.w))),
        a=linear(),
        b=linear(),
        watch=Watch(seen, "saved by the function"),
        w=weight(WIDTH),
    ).double()
    kept, work, _, _ = split(module, received_tensor())
    del kept
    assert seen["saved by the function"].expired()
    work.run()


def test_all_is_let_go_after_the_weights() -> None:
    for name in (name for name in STAGES if "compiled" not in name):
        received = received_tensor()
        storage = StorageWeakRef(received.untyped_storage())
        kept, work, _, _ = split(make(name), received)
        work.run()
        del kept, received
        assert storage.expired(), name
