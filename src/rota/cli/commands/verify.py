"""`rota verify`."""

from __future__ import annotations

import argparse

from rota.cli import files
from rota.cli.arguments import add_json, add_length, add_timeout, number
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser, one_of
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_text

_AGAINST = ("batch", "microbatches")
_DETAILS = """

The command starts the plan's processes, makes the model in each, splits it as the plan says, and runs the plan once on
a batch from make_batch. The first process also runs the unsplit model with the same weights. Rota compares the loss,
the outputs and every gradient in float64 (exact to 1e-10) and in the model's own dtype, with dropout switched off.
A model that cannot run in float64 is compared in its own dtype only; a note says so and why.

If the results differ, Rota says where, and names the cause, such as a BatchNorm or a loss that mixes the rows of a
batch, unequal numbers of tokens per micro-batch, random numbers, a different mask in a stage, tied weights that were
separated by a cut, or a parameter without a gradient.

exit code: 0 exact, 1 not exact, 2 invalid input"""


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota verify` to its parser."""
    parser.add_argument("plan", help="plan.json")
    help_text = "Python file that defines make_model(), make_batch(rows) and loss_fn, as for `rota autoplan`, and "
    help_text += "make_unsplit() if make_model returns rota.Stages that you built yourself; or hf:config.json for a "
    help_text += "language model from Hugging Face transformers"
    parser.add_argument("model", metavar="MODEL.py", help=help_text)
    add_length(parser)
    help_text = "rows per micro-batch (default: as in the plan, or 1 if the plan does not say)"
    parser.add_argument("--rows", type=number(1), metavar="N", help=help_text)
    help_text = "run the unsplit model on the whole batch (default), or one micro-batch at a time, as gradient "
    help_text += "accumulation does and BatchNorm requires"
    parser.add_argument(
        "--against", type=one_of(_AGAINST, "--against"), choices=_AGAINST, default="batch", help=help_text
    )
    parser.add_argument(
        "--own-dtype", action="store_true", help="compare in the model's own dtype only, not in float64"
    )
    add_timeout(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print whether the split model is exact. Returns the exit code: 0 if it is, else 1."""
    planned = files.read_plan(arguments.plan)
    require("torch", "torch")
    from rota.planning.model_file import load_model_file
    from rota.planning.verify_on_ranks import Options, verify_plan

    load_model_file(arguments.model, arguments.length)  # what it lacks is said once, and not by every rank
    if not any(task.kind.makes_weight_gradients for task in planned.placement.tasks):
        raise InputError(f"{arguments.plan} has forward passes only, so there are no gradients to verify")
    rows = arguments.rows or planned.microbatch_rows or 1
    how = (arguments.against, not arguments.own_dtype, arguments.timeout, arguments.length)
    options = Options(arguments.model, rows, *how)
    found = verify_plan(planned, options)
    if arguments.json:
        print_json({"exact": found.exact, **found.to_fields()})
    else:
        print_text(found.to_text())
    return 0 if found.exact else 1


COMMAND = Command(
    "verify",
    "check that the split model is exact: same loss and gradients as the unsplit model",
    "rota verify plan.json model.py",
    add_arguments,
    run,
    _DETAILS,
)
