"""Named schedules: each a function (placement, num_microbatches, …) -> Plan, one file per family; and your own."""

from __future__ import annotations

from rota.schedules.chimera import chimera
from rota.schedules.controllable_memory import v_half, v_min
from rota.schedules.custom import PipeSchedule
from rota.schedules.dualpipe import dualpipe, dualpipe_v
from rota.schedules.families import FAMILIES, NAMED, Family
from rota.schedules.gpipe import forward_only, gpipe
from rota.schedules.hanayo import hanayo
from rota.schedules.interleaved import interleaved_one_f_one_b, interleaved_zero_bubble, looped_bfs
from rota.schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b, seq1f1b
from rota.schedules.table import compare_schedules
from rota.schedules.varuna import varuna
from rota.schedules.zero_bubble import zb_h1, zb_h2, zb_v

__all__ = [
    "FAMILIES",
    "NAMED",
    "Family",
    "PipeSchedule",
    "chimera",
    "compare_schedules",
    "dualpipe",
    "dualpipe_v",
    "eager_one_f_one_b",
    "forward_only",
    "gpipe",
    "hanayo",
    "interleaved_one_f_one_b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "seq1f1b",
    "v_half",
    "v_min",
    "varuna",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
