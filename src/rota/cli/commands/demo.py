"""`rota demo`."""

from __future__ import annotations

from argparse import Namespace

from rota.cli import files
from rota.cli.arguments import add_output, number
from rota.cli.parser import Command, Parser
from rota.cli.requirements import require


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota demo` to its parser."""
    parser.add_argument(
        "--steps", type=number(1), metavar="N", default=20, help="number of training steps (default: 20)"
    )
    add_output(
        parser, "FOLDER", "folder for the demo's files (default: rota-demo)", default="rota-demo", writes="folder"
    )


def run(arguments: Namespace) -> int:
    """Run the demo, which writes its files to the output folder. Returns the exit code."""
    require("torch", "torch")
    from rota.demo.walkthrough import run_demo

    files.make_folder(arguments.output)
    run_demo(arguments.output, arguments.steps)
    return 0


COMMAND = Command(
    "demo",
    "take a quick tour: plan a small GPT, train it, compare the run with the plan, and explain its idle time",
    "rota demo",
    add_arguments,
    run,
)
