"""What an optimizer keeps and takes, learned from real steps of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from rota.profiling.clocks import Laps, Run
from rota.runtime.memory_watch import storages
from rota.runtime.torch_internals import address_of

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class OptimizerCosts(NamedTuple):
    """`bytes_of` the state, by position among the module's parameters; `us` of a step."""

    bytes_of: list[int]
    us: float


def optimizer_costs(module: nn.Module, make: MakeOptimizer | None, measure: Callable[[Run], Laps]) -> OptimizerCosts:
    """Of an optimizer over the module's trainable parameters, which it changes; nothing without one.

    `measure` takes a step's time.
    """
    parameters = [*module.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if make is None or not trained:
        return OptimizerCosts([0] * len(parameters), 0.0)
    optimizer = make(trained)
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # it makes its state in its first one

    def run(mark: Callable[[], None]) -> None:
        mark()
        optimizer.step()
        mark()

    state: dict[Any, Any] = optimizer.state
    bytes_of = [_state_bytes(state.get(parameter, {})) for parameter in parameters]
    return OptimizerCosts(bytes_of, measure(run).us[0])


def _state_bytes(state: Any) -> int:
    return sum({address_of(storage): storage.nbytes() for storage in storages(state)}.values())
