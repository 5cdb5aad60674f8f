"""The causes of idle time. `docs/explain.md` defines each of them to the microsecond.

If several causes hold at the same time, `idle_time` decides by the order in which it lays intervals over each other: a
later call of `_overlaid` hides what is there. `delays.Overruns` divides an overrun into CORES and SLOWER.

CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from rota.core.tasks import Op, Transfer
from rota.core.timeline import StepEndWork


class Cause(StrEnum):
    """Why a rank is idle. `docs/explain.md` says which cause counts if several hold at the same time."""

    STEP_END = "step end"  #: gradients are reduced, or the optimizer steps
    SLOWER = "slower"  #: extra waiting, because ops upstream ran longer than planned
    CORES = "cores"  #: more ranks of the machine are busy than it has cores
    ORDER = "order"  #: another op is ready, but the plan has it later
    MEMORY = "memory"  #: another op is ready, but it would not fit in memory
    WARM_UP = "warm-up"  #: the rank's first op waits for an op on another rank
    WAITING = "waiting"  #: the next op needs one that another rank has not finished
    SHARED_LINK = "link"  #: an input of the next op waits for a link that transfers share
    TRANSFER = "transfer"  #: an input of the next op is in transit
    COPY = "copy"  #: the next op waits for a copy between the rank and its host
    LAUNCH = "launch"  #: the next op is ready but has not started yet
    DRAIN = "drain"  #: the rank has no op left


#: Each cause in words, for text reports.
DESCRIPTIONS = {
    Cause.STEP_END: "gradients are reduced, or the optimizer steps",
    Cause.SLOWER: "extra waiting, because ops upstream ran longer than planned",
    Cause.CORES: "more ranks are busy than the machine has cores",
    Cause.ORDER: "another op was ready, but the plan has it later",
    Cause.MEMORY: "another op was ready, but would not fit in memory",
    Cause.WARM_UP: "the first micro-batches have not arrived yet",
    Cause.WAITING: "the next op needs one that another rank has not finished",
    Cause.SHARED_LINK: "an input waits for a link that others are using",
    Cause.TRANSFER: "an input of the next op is in transit",
    Cause.COPY: "the next op waits for a copy to or from the host",
    Cause.LAUNCH: "the next op is ready but has not started yet",
    Cause.DRAIN: "the rank has finished, but others have not",
}


#: After Tol's muted palette: colour-blind people can tell the causes apart, and no cause looks like a kind of work.
#: What every schedule has (warm-up, waiting, order, drain) is pale; strong colours are faults.
COLORS: dict[Cause, str] = {
    Cause.SLOWER: "#AA4499",
    Cause.CORES: "#CC6677",
    Cause.ORDER: "#CBBF9B",
    Cause.MEMORY: "#A03A6A",
    Cause.STEP_END: "#999933",
    Cause.WARM_UP: "#88CCEE",
    Cause.WAITING: "#8899A6",
    Cause.SHARED_LINK: "#332288",
    Cause.TRANSFER: "#44AA99",
    Cause.COPY: "#661100",
    Cause.LAUNCH: "#4E8F5A",
    Cause.DRAIN: "#B3ADDC",
}


class Idle(NamedTuple):
    """An interval of one rank's idle time with one cause.

    Attributes:
        rank: The idle rank.
        start_us: Start in µs from the step's start.
        end_us: End in µs from the step's start.
        cause: Why the rank is idle.
        waits_for: The op, transfer or step end work that the rank waits for; for LAUNCH the op that starts late, for
            DRAIN what ends the step.
        ready: For ORDER and MEMORY, the op that could have run in the meantime.
    """

    rank: int
    start_us: int
    end_us: int
    cause: Cause
    waits_for: Op | Transfer | StepEndWork | None
    ready: Op | None = None

    @property
    def duration_us(self) -> int:
        """Length in µs."""
        return self.end_us - self.start_us
