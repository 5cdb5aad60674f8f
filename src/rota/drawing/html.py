"""Timelines as a page: one file that asks for nothing else, to be opened from disk.

Its script and style lie in `page/`, and are put into the file. The page's policy names them by their hashes, so that
nothing else can run, whatever a title says.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from importlib.resources import files
from typing import Any

from rota.accounting import idle
from rota.drawing.looks import CAUSE_LOOKS, LOOKS
from rota.drawing.packing import CAUSES, Columns, pack_timeline
from rota.drawing.summary import summary
from rota.plan import Plan
from rota.simulation import timeline_of
from rota.timeline import Timeline
from rota.units import size_text

# In the order in which they read best; functions may call those of later files.
_SCRIPTS = (
    *("unpack", "model", "memory", "colors", "pixels", "view", "layout", "words"),
    *("paint", "marks", "overlays", "pointing", "gestures", "controls", "idle_bars", "main"),
)


Names = tuple[str, str]


def default_names(above: Timeline, below: Timeline) -> Names:
    """Of two timelines of one plan the upper is what was planned."""
    return ("planned", "measured") if _is_planned(above, below) else ("above", "below")


def _is_planned(above: Timeline, below: Timeline) -> bool:
    return above.plan.orders == below.plan.orders


def to_html(
    timeline: Timeline | Plan,
    *,
    above: Timeline | Plan | None = None,
    title: str | None = None,
    names: Names | None = None,
    bound_us: float | None = None,
) -> str:
    """The page of a timeline; with `above`, of two, one over the other and aligned in time.

    Plans are simulated. Where `above` has the same ops in the same orders it is what was planned, and the causes of
    idle time are told against it. `names`: of the upper and the lower one. `bound_us`: no makespan for the placement of
    `timeline` is shorter.
    """
    timeline = timeline_of(timeline)
    columns = Columns()
    if above is None:
        fields = [_fields(timeline, None, "", bound_us, columns)]
        told, title = fields[0]["summary"], title or "Rota"
    else:
        above = timeline_of(above)
        names = names or default_names(above, timeline)
        planned = above if _is_planned(above, timeline) else None
        fields = [_fields(above, None, names[0], None, columns)]
        fields.append(_fields(timeline, planned, names[1], bound_us, columns))
        told, title = "", title or " over ".join(names)  # each has a heading
    head = {
        "looks": {key: {"word": look.word, "color": look.color, "mark": look.marks} for key, look in LOOKS.items()},
        "causes": [{"word": str(cause), "color": CAUSE_LOOKS[cause]} for cause in CAUSES],
        "columns": columns.types,
        "timelines": fields,
    }
    return _page(title, head, columns.text(), told)


def _fields(
    timeline: Timeline, planned: Timeline | None, name: str, bound_us: float | None, columns: Columns
) -> dict[str, Any]:
    return {
        "title": name,
        "summary": _told(timeline, bound_us),
        **pack_timeline(timeline, idle(timeline, planned), columns),
    }


def _told(timeline: Timeline, bound_us: float | None) -> str:
    peak = max(timeline.peak_memory_bytes)
    return summary(timeline, bound_us) + (f" · peak {size_text(peak)}" if peak else "")


def _page(title: str, head: dict[str, Any], data: str, told: str) -> str:
    style, script = _style(), _script()
    allowed = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    parts = {
        "policy": f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'",
        "title": html.escape(title),
        "summary": html.escape(told),
        "style": style,
        "script": script,
        "head": json.dumps(head, separators=(",", ":")).replace("<", "\\u003c"),  # no tag ends within it
        "data": data,
    }
    page = _read("page.html")
    pieces = []
    while page:  # once from front to back: what is put in is not searched for names
        before, _, rest = page.partition("{")
        name, _, page = rest.partition("}")
        pieces += [before, parts[name] if rest else ""]
    return "".join(pieces)


@cache
def _script() -> str:
    return '"use strict";\n(() => {\n' + "\n".join(_read(f"{name}.js") for name in _SCRIPTS) + "})();\n"


@cache
def _style() -> str:
    return _read("page.css")


def _read(name: str) -> str:
    return files("rota.drawing").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names what it allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
