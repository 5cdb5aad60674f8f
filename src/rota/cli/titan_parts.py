"""A plan's stages as parts of a model for torchtitan, and whether it can run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rota.cli.requirements import InputError
from rota.core.errors import FormatError, PipelineError, SplitError

if TYPE_CHECKING:
    from rota.interop.modules import Parts
    from rota.planning.model_file import ExportedModel

#: A requirement of torchtitan that not every model meets.
LEAVES_NONE = (
    "In each stage, torchtitan replaces the modules of other stages with None, so the model's "
    "forward must skip them, as the forward of torchtitan's own models does."
)


def titan_parts(exported: ExportedModel, cuts: Sequence[str] | None, num_stages: int) -> Parts:
    """Cut at CutPoints if the model has any; otherwise a stage begins with each of the modules in `cuts`."""
    from rota.interop import module_parts, parts_beginning_with
    from rota.models import split
    from rota.models.cutpoint import find_cut_points

    model = exported.model
    if find_cut_points(model):
        chosen = None if cuts is None else [int(cut) if cut.isdecimal() else cut for cut in cuts]
        try:
            model, inputs = exported.with_batch()
        except FormatError as error:
            raise InputError(f"{error}; it is needed to cut a model at its CutPoints") from None
        return module_parts(model, split(model, num_stages, chosen, example=inputs))
    if cuts is None:
        raise InputError(
            f"--model {exported.path}: the model has no CutPoint; give --cuts, the module that each stage after the "
            f"first begins with, such as --cuts layers.2,layers.4"
        )
    return parts_beginning_with(model, cuts)


def checked_parts(exported: ExportedModel, parts: Parts) -> str:
    """What to print of the check that each stage runs alone. Raises SplitError if one does not."""
    from rota.interop import check_parts

    try:
        model, inputs = exported.with_batch()
        check_parts(model, parts, inputs)
    except SplitError as error:
        remedy = "If torchtitan trains another model with these names, export with --unchecked"
        raise SplitError(f"{error}. {remedy}") from None
    except (FormatError, PipelineError) as error:
        return f"{LEAVES_NONE} This was not checked: {error}."
    if any(parameter.is_meta for parameter in model.parameters()):
        return (
            "Checked, by shapes only: every stage runs without the modules of the others, and together they give "
            "outputs of the same shapes and dtypes as the model's."
        )
    return (
        "Checked: every stage runs without the modules of the others, and together they compute what the model "
        "computes."
    )
