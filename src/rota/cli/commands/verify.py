"""`rota verify`."""

from __future__ import annotations

import argparse
import json

from rota.cli import files
from rota.cli.arguments import number, seconds
from rota.cli.parser import Command, Parser, one_of
from rota.cli.requirements import InputError, require

_AGAINST = ("batch", "microbatches")
_DETAILS = """

It starts the plan's processes, lets them make the model, cuts it as the plan says, and runs the plan once on a batch of
make_batch. The first process also runs the unsplit model, with the same weights. Loss, outputs and every gradient are
compared, in float64 (exact up to 1e-10) and in the model's own dtype; dropout is switched off.

If they differ, it says where, and why: a BatchNorm or a loss that mixes the rows of a batch, unequal numbers of tokens
per micro-batch, random numbers, another mask in a stage, a tie that was cut, a parameter without gradient.

exit code: 0 exact, 1 not exact, 2 wrong input"""


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota verify` to its parser."""
    parser.add_argument("plan", help="plan.json")
    help_text = "Python file with make_model(), make_batch(rows) and loss_fn, as for rota autoplan; where make_model "
    help_text += "returns Stages made by hand, make_unsplit() returns what they must equal; or hf:config.json"
    parser.add_argument("model", metavar="MODEL.py", help=help_text)
    help_text = "tokens per row, where MODEL.py makes no batch (default: 1024, or as many as the model takes)"
    parser.add_argument("--length", type=number(1), metavar="N", help=help_text)
    parser.add_argument("--rows", type=number(1), metavar="N", help="of a micro-batch (default: the plan's, else 1)")
    help_text = "the unsplit model runs on the whole batch (default), or on one micro-batch after the other: what "
    help_text += "BatchNorm sees in any accumulation of gradients"
    parser.add_argument(
        "--against", type=one_of(_AGAINST, "--against"), choices=_AGAINST, default="batch", help=help_text
    )
    parser.add_argument("--own-dtype", action="store_true", help="compare in the model's own dtype alone, not float64")
    parser.add_argument("--timeout", type=seconds, metavar="S", help="limit on no progress of a rank")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print whether the split model is exact. Returns the exit code: 0 if it is, else 1."""
    planned = files.read_plan(arguments.plan)
    require("torch", "torch")
    from rota.planning.model_file import load_model_file
    from rota.planning.verify_on_ranks import Options, verify_plan

    load_model_file(arguments.model, arguments.length)  # what it lacks is said once, and not by every rank
    if not any(task.kind.makes_weight_gradients for task in planned.placement.tasks):
        raise InputError(f"{arguments.plan} has forwards alone, so there are no gradients to verify")
    rows = arguments.rows or planned.microbatch_rows or 1
    how = (arguments.against, not arguments.own_dtype, arguments.timeout, arguments.length)
    options = Options(arguments.model, rows, *how)
    found = verify_plan(planned, options)
    print(json.dumps({"exact": found.exact, **found.to_fields()}) if arguments.json else found.to_text())
    return 0 if found.exact else 1


COMMAND = Command(
    "verify",
    "whether the model as the plan cuts and runs it is exactly the unsplit one",
    "rota verify plan.json model.py",
    add_arguments,
    run,
    _DETAILS,
)
