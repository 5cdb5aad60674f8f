"""Rules that say which instruction waits for which: functions of two annotated arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import get_type_hints

from rota.compat.rene.instruction import Backward, Forward, Instruction, ReneError

Rule = Callable[..., bool]


def forward_dep(inst1: Forward, inst2: Forward) -> bool:
    """A micro-batch goes forward from stage to stage."""
    return inst1.micro_batch_id == inst2.micro_batch_id and inst1.stage_id + 1 == inst2.stage_id


def backward_dep(inst1: Backward, inst2: Backward) -> bool:
    """A micro-batch comes back from stage to stage."""
    return inst1.micro_batch_id == inst2.micro_batch_id and inst1.stage_id == inst2.stage_id + 1


def dependencies(rules: Sequence[Rule], insts: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """(i, j) where a rule says that `insts[j]` waits for `insts[i]`, of all pairs with its types. Raises ReneError."""
    for rule in rules:
        first, second = _types(rule)
        targets = [(j, inst) for j, inst in enumerate(insts) if isinstance(inst, second)]
        for i, source in enumerate(insts):
            if isinstance(source, first):
                for j, target in targets:
                    waits = rule(source, target)
                    if waits is True:
                        yield i, j
                    elif waits is not False:
                        raise ReneError(
                            f"dependency rule {_name(rule)} returned {waits!r} for {source} and {target}; "
                            f"return True or False"
                        )


def _types(rule: Rule) -> tuple[type[Instruction], type[Instruction]]:
    if not inspect.isfunction(rule):
        raise ReneError(f"dependency rule {rule!r} is no function; write it as def rule(inst1: …, inst2: …) -> bool")
    names = list(inspect.signature(rule).parameters)
    if len(names) != 2:
        raise ReneError(f"dependency rule {_name(rule)} has {len(names)} arguments; it takes two instructions")
    try:
        hints = get_type_hints(rule)
    except (NameError, TypeError) as error:
        raise ReneError(f"the annotations of dependency rule {_name(rule)} cannot be read: {error}") from None
    for name in names:
        hint = hints.get(name)
        if hint is None:
            raise ReneError(f"argument {name} of dependency rule {_name(rule)} has no annotation; annotate its type")
        if not isinstance(hint, type) or not issubclass(hint, Instruction):
            raise ReneError(
                f"argument {name} of dependency rule {_name(rule)} is annotated {hint!r}; use Instruction or a "
                f"class derived from it, such as Forward"
            )
    return hints[names[0]], hints[names[1]]


def _name(rule: Rule) -> str:
    return getattr(rule, "__name__", repr(rule))
