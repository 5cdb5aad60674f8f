"""`rota autoplan --exportable` refuses cuts that no other trainer can make, before anything is measured or searched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rota.cli.requirements import InputError
from rota.cli.screen import note
from rota.errors import SplitError
from rota.layers import LayerCosts

if TYPE_CHECKING:
    from rota.planning.model_file import ModelFile

_INSIDE = re.compile(r"(.*?\.\d+)\.")  # of a block, which is an entry of a list of modules: layers.0.mlp
_NUMBER = re.compile(r"\.\d+$")
_ELSE = "or plan for Rota, without --exportable"


def refuse_cuts_of_model(model_file: ModelFile, cuts: Sequence[str] | None) -> None:
    """Raise InputError for a cut inside a block; warn if torchtitan cannot make the cuts, though others can.

    Args:
        model_file: The model; it is made on the meta device if possible.
        cuts: Those of `--cuts`.
    """
    from rota.interop.modules import module_parts, require_cuts
    from rota.models import Stages, finest, is_sequential
    from rota.models.cut_table import holds
    from rota.models.cutpoint import find_cut_points
    from rota.models.unmodified import candidate_paths

    model = model_file.made_without_weights()
    if isinstance(model, Stages):
        _warn("it is rota.Stages, not an nn.Module")
        return
    if is_sequential(model) or find_cut_points(model):
        stages, names = finest(model, None if is_sequential(model) else model_file.made_batch(1)[0], cuts)
        _refuse(names, [holds(stage) for stage in stages.modules])
        _warn_if_refused(lambda: module_parts(model, stages))
        return
    candidates = candidate_paths(model, cuts)
    for name in candidates:
        if match := _INSIDE.match(name):
            raise _inside(name, match[1])
    _warn_if_refused(lambda: require_cuts(model, candidates))


def refuse_cuts_of_profile(profiles: Mapping[int, LayerCosts]) -> None:
    """Raise InputError if a profile has a cut inside a block."""
    for layers in profiles.values():
        _refuse(layers.cuts, layers.contents)


def _refuse(cuts: Sequence[str], contents: Sequence[str]) -> None:
    """Raise InputError if the layers on both sides of a cut hold parts of one block, or if a cut's name is inside one.

    CutPoints are not among the contents, so one at the end or the beginning of a block is accepted.
    """
    held = [text.split(", ") for text in contents]
    for cut, before, after in zip(cuts, held, held[1:], strict=False):
        both = {*_blocks(before)} & {*_blocks(after)}
        named = _INSIDE.match(cut)
        if named and any(name == cut or name.startswith(f"{cut}-") for name in after):
            raise _inside(cut, named[1])
        if both:
            raise InputError(f"{_refusal(cut, min(both))}; call the CutPoint between blocks, {_ELSE}")


def _blocks(names: Sequence[str]) -> Iterator[str]:
    """The blocks of which a layer holds parts."""
    yield from (match[1] for name in names if (match := _INSIDE.match(name)))


def _inside(cut: str, block: str) -> InputError:
    blocks = _NUMBER.sub(".*", block)
    return InputError(f"{_refusal(cut, block)}; cut between blocks with --cuts '{blocks}', {_ELSE}")


def _refusal(cut: str, block: str) -> str:
    return (
        f"--exportable: other trainers cannot begin a stage at {cut}, because it is inside {block}, which they keep or "
        f"remove as a whole"
    )


def _warn_if_refused(by_torchtitan: Callable[[], object]) -> None:
    try:
        by_torchtitan()
    except SplitError as error:
        _warn(str(error))


def _warn(why: str) -> None:
    note(
        "autoplan",
        "warning: the plan can be exported to Megatron and DeepSpeed only; torchtitan cannot run this model in "
        f"stages: {why}",
    )
