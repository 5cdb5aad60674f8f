"""`rota plan-batch`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rota import reading
from rota.cli import files, json_reports
from rota.cli.arguments import add_json, add_limit, add_links, add_output, cluster_of, number
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_text, progress_line
from rota.cli.searching import STARTING
from rota.sizes import SizeModel


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota plan-batch` to its parser."""
    help_text = (
        "costs of the stages as a function of length, from `rota profile MODEL.py --lengths 64,128,256 -o sizes.json`"
    )
    parser.add_argument("sizes", metavar="SIZES.json", help=help_text)
    help_text = (
        "lengths, in tokens, of the samples in a batch, such as [130, 85, 2300], or in several batches, such as "
        "[[130, 85], [77, 512]]"
    )
    parser.add_argument("lengths", metavar="LENGTHS.json", help=help_text)
    parser.add_argument("--ranks", type=number(1), metavar="N", help="number of ranks (default: one per stage)")
    add_limit(parser)
    add_links(parser)
    help_text = "put the samples of a micro-batch one after another in one row, instead of padding each to the longest"
    parser.add_argument("--packed", action="store_true", help=help_text)
    add_json(parser)
    help_text = "write the plan of each batch as batch0.json, batch1.json, …; Rota creates the folder if necessary"
    add_output(parser, "FOLDER", help_text, writes="files in a folder")


def run(arguments: Namespace) -> int:
    """Plan each batch, print how good its plan is and among what, and write the plans. Returns the exit code."""
    require("numba", "search")
    import rota

    text = files.text_of(arguments.sizes)
    with files.named(arguments.sizes):
        model = SizeModel.from_json(text)
    batches = _batches(arguments.lengths)
    cluster = cluster_of(arguments, model.num_stages, arguments.limit)
    made: list[rota.BatchPlan] = []
    for i, lengths in enumerate(batches):
        path = f"{arguments.lengths}, batch {i}" if len(batches) > 1 else arguments.lengths
        with files.named(path), progress_line() as show:
            show(f"planning batch {i} of {len(batches)}" if made else STARTING)
            found = rota.plan_batch(model, cluster, lengths, packed=arguments.packed)
        if not arguments.json:
            print_text(f"batch {i}: {found.to_text()}" if len(batches) > 1 else found.to_text())
        made.append(found)
    if arguments.json:
        print_json({"batches": [json_reports.of_batch(found) for found in made]})
    if arguments.output is None:
        if not arguments.json:
            print("The plans were not saved; use -o FOLDER to save them.")
        return 0
    files.make_folder(arguments.output)
    for i, found in enumerate(made):
        path = Path(arguments.output) / f"batch{i}.json"
        files.write(str(path), found.plan.to_json(), quietly=arguments.json)
    return 0


def _batches(path: str) -> list[list[int]]:
    """The lengths of each batch."""
    text = files.text_of(path)
    with files.named(path):
        found = reading.load(text)
    batches = found if isinstance(found, list) and found and isinstance(found[0], list) else [found]
    for batch in batches:
        if not isinstance(batch, list) or not all(type(length) is int for length in batch):
            raise InputError(
                f"{path}: expected the lengths of a batch as whole numbers, such as [130, 85, 2300], or a list of such "
                f"batches, but found {reading.short(batch)}"
            )
    return batches


COMMAND = Command(
    "plan-batch",
    "plan batches whose samples differ in length: group samples into micro-batches and order them, with a proven bound",
    "rota plan-batch sizes.json lengths.json --limit 40GB -o plans",
    add_arguments,
    run,
)
