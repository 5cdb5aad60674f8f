"""A chain of three stages, one of which goes wrong in the forward or backward of one micro-batch."""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rota import Cluster, Costs, Plan, Stages, place
from rota.schedules import NAMED
from support.networks import Layer

NUM_RANKS = 3


class Fails(Layer):
    """Calls `act` in the forward or backward (`where`) of one micro-batch and all later ones; they come in order."""

    def __init__(self, act: Callable[[], None], where: str, microbatch: int) -> None:
        super().__init__()
        self.act, self.where, self.left = act, where, microbatch

    def act_if_it_is_time(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.act()

    def forward(self, *values: Tensor) -> Tensor:
        if self.where == "forward":
            self.act_if_it_is_time()
        output = super().forward(*values)
        if self.where == "backward":
            output.register_hook(lambda _: self.act_if_it_is_time())
        return output


def break_on_purpose() -> None:
    raise ValueError("broken on purpose")


def hang(*_: Any, **__: Any) -> None:
    time.sleep(1000)


def plan_for(schedule: str = "1f1b", num_microbatches: int = 4) -> Plan:
    placement = place(Costs.uniform(NUM_RANKS, 10, 20), Cluster.uniform(NUM_RANKS))
    if schedule == "forward_only":
        placement = placement.forward_only()
    return NAMED[schedule](placement, num_microbatches)


def stages_with(module: nn.Module, at: int) -> Stages:
    return Stages([(module if stage == at else Layer()).double() for stage in range(NUM_RANKS)])
