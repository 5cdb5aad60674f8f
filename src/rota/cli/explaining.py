"""`rota explain` and `rota import-trace`."""

from __future__ import annotations

from argparse import Namespace

from rota import accounting
from rota.cli import files


def explain(arguments: Namespace) -> int:
    if arguments.second is not None:
        a, b = arguments.timeline, arguments.second
        raise files.InputError(
            f"explain tells of one file, not of {a} and {b}; for what was planned and what was measured give "
            f"`rota explain measured.json --planned plan.json`; `rota compare` sets the two side by side"
        )
    timeline = files.read_timeline(arguments.timeline)
    planned = timeline.plan if arguments.planned is None else files.read_timeline(arguments.planned)
    explanation = accounting.explain(timeline, planned, arguments.cores)
    print(explanation.to_json() if arguments.json else explanation.to_text() + "\n", end="")
    return 0


def import_trace(arguments: Namespace) -> int:
    from rota.interop import import_traces

    imported = import_traces(arguments.traces, arguments.step)
    print(imported.to_text())
    print()
    print(accounting.explain(imported.timeline, imported.timeline.plan, arguments.cores).to_text())
    if arguments.output is None:
        print("Not written; use -o timeline.json to keep it.")
    else:
        files.write(arguments.output, imported.timeline.to_json())
        print(f"Wrote {arguments.output}; see it by `rota show {arguments.output} -o timeline.html`.")
    return 0
