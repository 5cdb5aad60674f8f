"""The same bars with what people use today, each as its manual shows it. Plotly and Bokeh: pip install plotly bokeh."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from watching import Watch

from rota import Timeline

_COLORS = {"F": "#0072B2", "B": "#E69F00"}
_NOW = "window.drawnAt ??= performance.now(); return window.drawnAt;"


def matplotlib_patches(timeline: Timeline, path: Path) -> None:
    """One rectangle per op."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(12, 14))
    ax = figure.add_subplot()
    for span in timeline.op_spans():
        box = Rectangle((span.start_us, span.rank - 0.4), span.duration_us, 0.8, color=_COLORS[span.work.kind])
        ax.add_patch(box)
    ax.set_xlim(0, timeline.makespan_us)
    ax.set_ylim(timeline.num_ranks, -1)
    figure.savefig(path, dpi=150)


def plotly_bars(timeline: Timeline, path: Path) -> None:
    """One horizontal bar per op, and a trace per kind."""
    import plotly.graph_objects as go

    figure = go.Figure(layout={"barmode": "overlay"})
    for kind, color in _COLORS.items():
        spans = [span for span in timeline.op_spans() if span.work.kind == kind]
        figure.add_bar(
            base=[span.start_us for span in spans],
            x=[span.duration_us for span in spans],
            y=[span.rank for span in spans],
            text=[str(span.work) for span in spans],
            textposition="none",
            orientation="h",
            name=kind,
            marker={"color": color, "line": {"width": 0}},
        )
    figure.write_html(path, include_plotlyjs=True, config={"scrollZoom": True})


def bokeh_quads(timeline: Timeline, path: Path) -> None:
    """One quad per op."""
    from bokeh.plotting import figure, output_file, save
    from bokeh.resources import INLINE

    spans = list(timeline.op_spans())
    chart = figure(width=1200, height=700, tools="xpan,xwheel_zoom,hover", active_scroll="xwheel_zoom")
    chart.quad(
        left=[span.start_us for span in spans],
        right=[span.end_us for span in spans],
        top=[span.rank + 0.4 for span in spans],
        bottom=[span.rank - 0.4 for span in spans],
        fill_color=[_COLORS[span.work.kind] for span in spans],
        line_color=None,
    )
    output_file(path, mode="inline")
    save(chart, filename=path, resources=INLINE, title="")


_PLOTLY = Watch(f"() => {{ if (!document.querySelector('.bars .point path')) return null; {_NOW} }}", ".nsewdrag")
_BOKEH = Watch(
    f"() => {{ if (!window.Bokeh?.documents?.[0]?.is_idle) return null; {_NOW} }}",
    ".bk-events",
)
TOOLS = [
    ("Matplotlib, a patch per op", matplotlib_patches, None),
    *([("Plotly", plotly_bars, _PLOTLY)] if find_spec("plotly") else []),
    *([("Bokeh", bokeh_quads, _BOKEH)] if find_spec("bokeh") else []),
]
