"""What a rank can be idle for. `docs/idle.md` defines each cause to the microsecond."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from rota.plan import Transfer
from rota.tasks import Op
from rota.timeline import StepEndWork


class Cause(StrEnum):
    """Why a rank is idle. Where several hold at once the first in this list counts."""

    STEP_END = "step end"  #: gradients are reduced, or the optimizer steps
    SLOWER = "slower"  #: an op upstream takes longer than planned
    CORES = "cores"  #: more ranks of the machine are busy than it has cores
    ORDER = "order"  #: an op is ready that the plan put later
    MEMORY = "memory"  #: an op is ready that would not fit in memory
    WARM_UP = "warm-up"  #: the rank's first op waits for an op of another rank
    WAITING = "waiting"  #: the next op waits for an op of another rank
    TRANSFER = "transfer"  #: what the next op reads is on its way
    LAUNCH = "launch"  #: the next op is ready and has not started yet
    DRAIN = "drain"  #: nothing is left to do


class Idle(NamedTuple):
    """A stretch of one rank's idle time, with one cause.

    `waits_for`: the op, transfer or step end work that the rank waits for; for LAUNCH the op that is late to start, for
    DRAIN what ends the step. `ready`: the op that could have run meanwhile, for ORDER and MEMORY.
    """

    rank: int
    start_us: int
    end_us: int
    cause: Cause
    waits_for: Op | Transfer | StepEndWork | None
    ready: Op | None = None

    @property
    def duration_us(self) -> int:
        return self.end_us - self.start_us
