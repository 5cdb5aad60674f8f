"""`rota import-trace`."""

from __future__ import annotations

import json
from argparse import Namespace

from rota import accounting
from rota.cli import files, json_reports
from rota.cli.arguments import add_cores, add_json, add_output, number
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.screen import print_text, progress_line, report_columns
from rota.units import count_text


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota import-trace` to its parser."""
    help_text = "trace of one rank from torch.profiler, .json or .json.gz; give one file per rank"
    parser.add_argument("traces", nargs="+", metavar="TRACE", help=help_text)
    parser.add_argument(
        "--step", type=number(0), metavar="N", help="number of the profiled step, counted from 0 (default: the last)"
    )
    add_cores(parser, "unknown; traces do not record it")
    add_json(parser)
    add_output(parser, "FILE", "write the timeline as JSON", writes="timeline")


def run(arguments: Namespace) -> int:
    """Print the traces as one timeline and explain it; write it to --output. Returns the exit code."""
    from rota.interop import import_traces

    with progress_line() as show:
        show(f"reading {count_text(len(arguments.traces), 'trace')} …")
        imported = import_traces(arguments.traces, arguments.step, arguments.cores)
        show("simulating what would help …")
        explanation = accounting.explain(imported.timeline, imported.timeline.plan)
    if arguments.json:
        print_json(json_reports.of_trace(imported) | json.loads(explanation.to_json()))
    else:
        print_text(imported.to_text())
        print()
        print(explanation.to_text(report_columns()))
    then = f"; see it with `rota show {arguments.output} -o timeline.html`"
    files.keep(arguments.output, imported.timeline.to_json(), "timeline.json", then, quietly=arguments.json)
    return 0


COMMAND = Command(
    "import-trace",
    "turn torch.profiler traces of PyTorch's pipeline engine into a timeline, and explain it",
    "rota import-trace rank*.json.gz -o timeline.json",
    add_arguments,
    run,
)
