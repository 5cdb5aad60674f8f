"""`rota autoplan --exportable` refuses cuts that no other trainer can make, before anything is searched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rota.cli.requirements import InputError
from rota.core.layers import LayerCosts

_INSIDE = re.compile(r"(.*?\.\d+)\.")  # of a block, which is an entry of a list of modules: layers.0.mlp
_NUMBER = re.compile(r"\.\d+$")
_ELSE = "or plan for Rota, without --exportable"


def refuse_cuts(profiles: Mapping[int, LayerCosts]) -> None:
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
