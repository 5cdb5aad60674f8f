"""Named schedules: each a function (placement, num_microbatches) -> Plan, one file a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rota.placement import Placement
from rota.plan import Plan
from rota.schedules.forward_only import forward_only
from rota.schedules.gpipe import gpipe
from rota.schedules.one_f_one_b import one_f_one_b

#: What the command line calls them.
NAMED: Mapping[str, Callable[[Placement, int], Plan]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "forward_only": forward_only,
}

__all__ = ["NAMED", "forward_only", "gpipe", "one_f_one_b"]
