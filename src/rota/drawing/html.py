"""Timelines as a page: one file that requests nothing else and is opened from disk.

Its script and style are in `page/`, and are embedded into the file. The page's content security policy names them by
their hashes, so that nothing else can run, whatever a title says.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from rota.accounting import idle
from rota.accounting.causes import COLORS, DESCRIPTIONS
from rota.core.plan import Plan
from rota.core.simulation import timeline_of
from rota.core.text import size_text
from rota.core.timeline import Timeline
from rota.drawing.looks import LOOKS, utilisation
from rota.drawing.packing import CAUSES, Columns, pack_timeline
from rota.drawing.text import summary

# In reading order; functions may call those of later files.
_SCRIPTS = (
    *("timeline", "memory", "colors", "lanes", "view", "layout", "words"),
    *("overlays", "links", "pointer", "controls", "main"),
)

Names = tuple[str, str]


def to_html(
    timeline: Timeline | Plan,
    *,
    above: Timeline | Plan | None = None,
    title: str | None = None,
    names: Names | None = None,
    bound_us: float | None = None,
) -> str:
    """Return the page of a timeline, or of two timelines with one time axis.

    Args:
        timeline: What to show. A plan is simulated first.
        above: A second timeline, shown above the first. If it has the same ops in the same orders, it counts as what
            was planned, and the causes of idle time of `timeline` are found by comparison with it.
        title: The page's title.
        names: Headings of the upper and the lower timeline. None: "planned" and "measured" if `above` is what was
            planned, "above" and "below" otherwise.
        bound_us: A proven lower bound of the makespan of `timeline`, to show the gap.

    Returns:
        The text of an .html file.
    """
    timeline = timeline_of(timeline)
    columns = Columns()
    if above is None:
        fields = [_fields(timeline, None, "", bound_us, columns)]
        page_summary, title = fields[0]["summary"], title or "Rota"
    else:
        above = timeline_of(above)
        names = names or default_names(above, timeline)
        planned = above if _is_planned(above, timeline) else None
        fields = [_fields(above, None, names[0], None, columns)]
        fields.append(_fields(timeline, planned, names[1], bound_us, columns))
        page_summary, title = "", title or " over ".join(names)  # each timeline has its summary in its heading
    head = {
        "looks": {key: {"word": look.word, "color": look.color, "mark": look.marks} for key, look in LOOKS.items()},
        "causes": [{"word": str(cause), "color": COLORS[cause], "text": DESCRIPTIONS[cause]} for cause in CAUSES],
        "columns": columns.types,
        "timelines": fields,
    }
    return _page(title, head, columns.text(), page_summary)


def default_names(above: Timeline, below: Timeline) -> Names:
    """Return headings for two timelines: of two that ran the same plan, the upper one is what was planned."""
    return ("planned", "measured") if _is_planned(above, below) else ("above", "below")


def _is_planned(above: Timeline, below: Timeline) -> bool:
    return above.plan.orders == below.plan.orders


def _fields(
    timeline: Timeline, planned: Timeline | None, name: str, bound_us: float | None, columns: Columns
) -> dict[str, Any]:
    """Add a timeline's columns, and return its entry in the page's head."""
    peak_bytes = max(timeline.peak_memory_bytes)
    return {
        "title": name,
        "summary": " · ".join(
            [
                summary(timeline, bound_us),
                *([f"peak {size_text(peak_bytes)}"] if peak_bytes else []),
                *(f"{name} {busy:.1%} busy" for name, busy in utilisation(timeline)),
            ]
        ),
        **pack_timeline(timeline, idle(timeline, planned), columns),
    }


def _page(title: str, head: dict[str, Any], data: str, page_summary: str) -> str:
    style, script = _read("page.css"), _script()
    allowed = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    parts = {
        "policy": f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'",
        "title": html.escape(title),
        "summary": html.escape(page_summary),
        "style": style,
        "script": script,
        "head": json.dumps(head, separators=(",", ":")).replace("<", "\\u003c"),  # no tag can end within it
        "data": data,
    }
    # In one pass: what is filled in is not searched for names.
    return re.sub("{([a-z]+)}", lambda name: parts[name[1]], _read("page.html"))


@cache
def _script() -> str:
    return '"use strict";\n(() => {\n' + "\n".join(_read(f"{name}.js") for name in _SCRIPTS) + "})();\n"


def _read(name: str) -> str:
    return files("rota.drawing").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
