"""`rota schedules`."""

from __future__ import annotations

from argparse import Namespace

from rota.cli.arguments import add_costs, add_json, add_step, cluster_of, measured, uniform
from rota.cli.parser import Command, Parser
from rota.cli.requirements import InputError
from rota.cli.screen import progress_line, terminal_columns
from rota.schedules import table
from rota.tables import fitted


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota schedules` to its parser."""
    add_step(parser)
    add_costs(parser, "rank; schedules with several stages per rank divide it among those stages")
    add_json(parser)


def run(arguments: Namespace) -> int:
    """Print the figures of all named schedules as a table or JSON. Returns the exit code."""
    if arguments.costs is None and arguments.ranks is None:
        raise InputError("how many ranks? give --ranks or --costs")
    costs = measured(arguments) if arguments.costs else uniform(arguments, arguments.ranks)
    if arguments.ranks not in (None, costs.num_stages):
        raise InputError(
            f"{arguments.costs} has {costs.num_stages} stages for --ranks {arguments.ranks}; give one stage per rank"
        )
    cluster = cluster_of(arguments, costs.num_stages, arguments.limit)
    with progress_line() as show:
        rows = table.compare_schedules(
            costs, cluster, arguments.microbatches, progress=lambda name: show(f"planning {name} …")
        )
    if arguments.json:
        print(table.to_json(rows), end="")
    else:
        print(table.to_text(rows, arguments.limit, terminal_columns()))
        if arguments.costs is arguments.forward_us is arguments.backward_us is None:
            assumed = "Assumed: F takes 1 ms and B takes 2 ms per rank; give --forward-us and --backward-us, or --costs"
            print(fitted(assumed, terminal_columns()))
    return 0


COMMAND = Command(
    "schedules",
    "compare all named schedules: time, bubble, memory, and whether they fit",
    "rota schedules --ranks 8 --microbatches 24 --forward-us 1000 --backward-us 2000 --activation 1GB --limit 8GB",
    add_arguments,
    run,
)
