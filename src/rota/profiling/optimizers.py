"""The memory and time of an optimizer, learned from real steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from rota.profiling.clocks import Laps, Run
from rota.runtime.memory_watch import storages
from rota.torch_internals import address_of

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class OptimizerCosts(NamedTuple):
    """`bytes_of`: the state's bytes per parameter of the module; `us`: the time of a step."""

    bytes_of: list[int]
    us: float


def optimizer_costs(module: nn.Module, make: MakeOptimizer | None, measure: Callable[[Run], Laps]) -> OptimizerCosts:
    """Costs of an optimizer of the module's trainable parameters, which are changed; zeros without an optimizer.

    `measure` measures the time of a step.
    """
    parameters = [*module.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if make is None or not trained:
        return OptimizerCosts([0] * len(parameters), 0.0)
    optimizer = make(trained)
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # the first step makes its state

    def run(mark: Callable[[], None]) -> None:
        mark()
        optimizer.step()
        mark()

    state: dict[Any, Any] = optimizer.state
    bytes_of = [_state_bytes(state.get(parameter, {})) for parameter in parameters]
    return OptimizerCosts(bytes_of, measure(run).us[0])


def _state_bytes(state: Any) -> int:
    return sum({address_of(storage): storage.nbytes() for storage in storages(state)}.values())
