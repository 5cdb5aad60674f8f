"""Pictures of timelines, as `rota show` and `rota compare` draw them."""

from __future__ import annotations

from pathlib import Path

from rota.cli.requirements import require
from rota.core.simulation import simulate
from rota.core.timeline import Timeline


def draw(
    timeline: Timeline,
    output: str,
    above: Timeline | None,
    names: tuple[str, str],
    bound_us: int | None = None,
    *,
    quietly: bool = False,
) -> None:
    """Write a picture of `timeline`, under `above` if there is one; `names` are the files of both, `above`'s first."""
    if not output.lower().endswith((".html", ".json")):
        require("matplotlib", "draw")
    from rota.drawing import save

    names = Path(names[0]).name, Path(names[1]).name
    title = " over ".join(names) if above else names[1]
    save(timeline, output, above=above, names=names, title=title, bound_us=bound_us)
    if not quietly:
        print(f"Wrote {output}.")


def is_measured(timeline: Timeline) -> bool:
    """Whether the timeline's times differ from those that its plan's costs give."""
    return timeline != simulate(timeline.plan)
