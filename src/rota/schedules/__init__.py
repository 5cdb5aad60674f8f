"""Named schedules: each a function (placement, num_microbatches, …) -> Plan, one file a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rota.placement import Placement
from rota.plan import Plan
from rota.schedules.forward_only import forward_only
from rota.schedules.gpipe import gpipe
from rota.schedules.interleaved import interleaved_one_f_one_b, interleaved_zero_bubble, looped_bfs
from rota.schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b
from rota.schedules.zero_bubble import zb_h1, zb_h2

#: What the command line calls them.
NAMED: Mapping[str, Callable[[Placement, int], Plan]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_one_f_one_b,
    "interleaved_1f1b": interleaved_one_f_one_b,
    "interleaved_zb": interleaved_zero_bubble,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "forward_only": forward_only,
}

__all__ = [
    "NAMED",
    "eager_one_f_one_b",
    "forward_only",
    "gpipe",
    "interleaved_one_f_one_b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "zb_h1",
    "zb_h2",
]
