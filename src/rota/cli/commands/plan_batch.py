"""`rota plan-batch`."""

from __future__ import annotations

from pathlib import Path

from rota.cli import common, files, reports
from rota.cli.command import Options, command
from rota.cli.plans import STARTING, cluster_of
from rota.cli.reports import print_json
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_text, progress_line
from rota.core import reading
from rota.core.sizes import SizeModel


@command("rota plan-batch sizes.json lengths.json --limit 40GB -o plans", name="plan-batch")
@common.argument(
    "sizes",
    metavar="SIZES.json",
    help="costs of the stages as a function of length, from `rota profile MODEL.py --lengths 64,128,256 -o sizes.json`",
)
@common.argument(
    "lengths",
    metavar="LENGTHS.json",
    help="lengths, in tokens, of the samples in a batch, such as [130, 85, 2300], or in several batches, such as "
    "[[130, 85], [77, 512]]",
)
@common.count("--ranks", help="number of ranks (default: one per stage)")
@common.limit
@common.links
@common.flag(
    "--packed",
    help="put the samples of a micro-batch one after another in one row, instead of padding each to the longest",
)
@common.json
@common.output(
    "FOLDER",
    "write the plan of each batch as batch0.json, batch1.json, …; Rota creates the folder if necessary",
    writes="files in a folder",
)
def plan_batch(options: Options) -> None:
    """Plan batches whose samples differ in length: group samples into micro-batches and order them, with a bound."""
    require("numba", "search")
    import rota

    model = files.read(options.sizes, SizeModel.from_json)
    batches = _batches(options.lengths)
    cluster = cluster_of(options, model.num_stages, options.limit)
    plans: list[rota.BatchPlan] = []
    for i, lengths in enumerate(batches):
        path = f"{options.lengths}, batch {i}" if len(batches) > 1 else options.lengths
        with files.named(path), progress_line(f"planning batch {i} of {len(batches)}" if plans else STARTING):
            plans.append(rota.plan_batch(model, cluster, lengths, packed=options.packed))
        if not options.json:
            text = plans[-1].to_text()
            print_text(f"batch {i}: {text}" if len(batches) > 1 else text)
    if options.json:
        print_json({"batches": [reports.of_batch(plan) for plan in plans]})
    if options.output is not None:
        files.make_folder(options.output)
        for i, plan in enumerate(plans):
            path = str(Path(options.output) / f"batch{i}.json")
            files.write(path, plan.plan.to_json(), quietly=options.json)
    elif not options.json:
        print("The plans were not saved; use -o FOLDER to save them.")


def _batches(path: str) -> list[list[int]]:
    content = files.read(path, reading.load)
    batches = content if isinstance(content, list) and content and isinstance(content[0], list) else [content]
    for batch in batches:
        if not isinstance(batch, list) or not all(type(length) is int for length in batch):
            raise InputError(
                f"{path}: expected the lengths of a batch as whole numbers, such as [130, 85, 2300], or a list of such "
                f"batches, but found {reading.short(batch)}"
            )
    return batches
