"""A timeline in one line, for titles."""

from __future__ import annotations

from rota.timeline import Timeline
from rota.units import time_text


def summary(timeline: Timeline, bound_us: float | None = None) -> str:
    """ "makespan 3.3 ms · bubble 27.3% · at most 2.1% from the best possible"."""
    parts = [f"makespan {time_text(timeline.makespan_us)}", f"bubble {timeline.bubble_fraction:.1%}"]
    if bound_us is not None:
        gap_us = timeline.makespan_us - bound_us
        found = (
            f"at most {gap_us / timeline.makespan_us:.1%} from the best possible" if gap_us > 0 else "proven optimal"
        )
        parts.append(found)
    return " · ".join(parts)
