"""`rota check`."""

from __future__ import annotations

from argparse import Namespace

from rota import checking, simulation
from rota.cli import files
from rota.cli.parser import Command, Parser
from rota.cli.screen import print_replicas


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota check` to its parser."""
    parser.add_argument("plan", help="plan.json, or a schedule CSV")


def run(arguments: Namespace) -> int:
    """Check the plan, and print its size, makespan (µs) and bubble. Returns the exit code."""
    planned = files.read_plan(arguments.plan)
    checking.check(planned)
    timeline = simulation.simulate(planned)
    limits = planned.placement.cluster.limit_bytes
    fits = "fits in memory" if any(limit is not None for limit in limits) else "no memory limit is set"
    print(
        f"{arguments.plan}: {planned.num_ops:,} ops of {planned.num_stages} stages and {planned.num_microbatches} "
        f"micro-batches on {planned.num_ranks} ranks: complete, in order, cannot deadlock, {fits}; "
        f"makespan {timeline.makespan_us:,} µs, bubble {timeline.bubble_fraction:.1%}"
    )
    print_replicas(planned, "checked")
    return 0


COMMAND = Command(
    "check", "refuse a plan that is wrong, could hang or would not fit", "rota check plan.json", add_arguments, run
)
