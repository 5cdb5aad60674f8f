"""What carving takes from PyTorch beyond its public functions is still there, and does what is expected of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from rota.models.carving.absent import Absent, absent
from rota.models.carving.copies import copy_sharing
from rota.models.carving.module_units import intercept
from rota.models.carving.operations import (
    is_random,
    is_shape_only,
    needs_numbers,
    storage_of,
)
from rota.torch_internals import TorchDispatchMode, compile_alike, name_of, written_arguments

CPU = torch.device("cpu")


def operations(run: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """All that `run` asks of PyTorch."""
    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, args))
            return func(*args, **(kwargs or {}))

    with See():
        run()
    return seen


def test_operations_are_classified() -> None:
    x = torch.ones(3)
    ((rand, _),) = operations(lambda: torch.rand(2))
    assert is_random(rand)
    assert name_of(rand) == "rand"
    ((zeros, _),) = operations(lambda: torch.zeros_like(x))
    assert is_shape_only(zeros)
    assert not is_random(zeros)
    assert any(needs_numbers(*one) for one in operations(lambda: x.sum().item()))
    assert any(needs_numbers(*one) for one in operations(lambda: x.nonzero()))
    assert any(needs_numbers(*one) for one in operations(lambda: x[x > 0]))
    assert not any(needs_numbers(*one) for one in operations(lambda: x[torch.arange(2)]))
    ((add, args),) = operations(lambda: x.add_(1))
    assert [*written_arguments(add, args, {})] == [x]
    ((add, args),) = operations(lambda: x.add(1))
    assert [*written_arguments(add, args, {})] == []


def test_a_view_is_in_the_memory_of_its_base() -> None:
    x = torch.ones(4)
    assert storage_of(x[1:]) == storage_of(x) != storage_of(x.clone())


def test_an_absent_has_all_but_numbers() -> None:
    x = absent((2, 3), torch.float64, CPU)
    made = torch.nn.functional.linear(x, torch.ones(5, 3, dtype=torch.float64)).softmax(-1)
    assert isinstance(made, Absent)
    assert (tuple(made.shape), made.dtype, made.device) == ((2, 5), torch.float64, CPU)
    assert torch.equal(torch.zeros_like(x), torch.zeros(2, 3, dtype=torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.linear(x.float(), torch.ones(5, 3)).dtype is torch.bfloat16


def test_a_module_stays_of_its_class_and_its_calls_are_seen() -> None:
    module, seen = nn.Linear(2, 2), []

    def interceptor(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(called)
        return nn.Linear.__call__(called, *args, **kwargs)

    x = torch.ones(1, 2)
    expected = module(x)
    intercept(module, interceptor)
    assert isinstance(module, nn.Linear)
    assert torch.equal(module(x), expected)
    assert seen == [module]


def test_global_hooks_see_what_modules_return() -> None:
    module, seen = nn.Linear(2, 2), []
    handle = register_module_forward_hook(lambda one, args, output: seen.append((one, output)))
    output = module(torch.ones(1, 2))
    handle.remove()
    assert seen == [(module, output)]


def test_a_copy_is_compiled_with_the_options_of_the_original() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    module = nn.Sequential(Block(2, 2))
    module[0].compile(backend=backend)
    copied = copy_sharing(module, {})
    assert copied[0]._compiled_call_impl is None
    assert copied[0].weight is module[0].weight
    compile_alike(module, copied)
    copied(torch.ones(1, 2))
    assert compiled
