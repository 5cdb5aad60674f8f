"""`rota verify`."""

from __future__ import annotations

import click

from rota.cli import common, files
from rota.cli.command import Choice, Options, command
from rota.cli.reports import print_json
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_text


@command("rota verify plan.json model.py")
@common.argument("plan", help="plan.json")
@common.argument(
    "model",
    metavar="MODEL.py",
    help="Python file that defines make_model(), make_batch(rows) and loss_fn, as for `rota autoplan`, and "
    "make_unsplit() if make_model returns rota.Stages that you built yourself; or hf:config.json for a language model "
    "from Hugging Face transformers",
)
@common.length
@common.count("--rows", help="rows per micro-batch (default: as in the plan, or 1 if the plan does not say)")
@click.option(
    "--against",
    type=Choice(("batch", "microbatches")),
    default="batch",
    help="run the unsplit model on the whole batch (default), or one micro-batch at a time, as gradient accumulation "
    "does and BatchNorm requires",
)
@common.flag("--own-dtype", help="compare in the model's own dtype only, not in float64")
@common.timeout
@common.json
def verify(options: Options) -> int:
    """Check that the split model is exact: same loss and gradients as the unsplit model.

    The command starts the plan's processes, makes the model in each, splits it as the plan says, and runs the plan once
    on a batch from make_batch. The first process also runs the unsplit model with the same weights. Rota compares the
    loss, the outputs and every gradient in float64 (exact to 1e-10) and in the model's own dtype, with dropout switched
    off. A model that cannot run in float64 is compared in its own dtype only; a note says so and why.

    If the results differ, Rota says where, and names the cause, such as a BatchNorm or a loss that mixes the rows of a
    batch, unequal numbers of tokens per micro-batch, random numbers, a different mask in a stage, tied weights that
    were separated by a cut, or a parameter without a gradient.

    Exit code: 0 exact, 1 not exact, 2 invalid input
    """
    planned = files.read_plan(options.plan)
    require("torch", "torch")
    from rota.planning.model_file import load_model_file
    from rota.planning.verify_on_ranks import Options as VerifyOptions, verify_plan

    load_model_file(options.model, options.length)  # what it lacks is said once, and not by every rank
    if not any(task.kind.makes_weight_gradients for task in planned.placement.tasks):
        raise InputError(f"{options.plan} has forward passes only, so there are no gradients to verify")
    rows = options.rows or planned.microbatch_rows or 1
    how = (options.against, not options.own_dtype, options.timeout, options.length)
    result = verify_plan(planned, VerifyOptions(options.model, rows, *how))
    if options.json:
        print_json({"exact": result.exact, **result.to_fields()})
    else:
        print_text(result.to_text())
    return 0 if result.exact else 1
