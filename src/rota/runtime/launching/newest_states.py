"""How far a script has come: what tells a run that goes on from one that repeats the same steps without end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import final

from rota.runtime.kept_memory import State


@final
class NewestStates:
    """The newest state of each training of a script: a second training begins with low steps again."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    def __iter__(self) -> Iterator[State]:
        return (State(*each) for each in self._steps.items())

    def note(self, states: Iterable[State]) -> bool:
        """Add these states; returns whether one of them is newer than all that were there."""
        newer = [state for state in states if state.step > self._steps.get(state.training, -1)]
        self._steps |= dict(sorted(newer))
        return bool(newer)


@final
class Losses:
    """Tells ranks that are lost one after the other in a run that goes on from a script that ends them all."""

    def __init__(self) -> None:
        self._at_last: NewestStates | None = None  # None: no rank was lost

    def have_come_further(self, states: Set[State]) -> bool:
        """Note a loss; returns whether a step was done since the one before. The first may be before any."""
        is_first = self._at_last is None
        if self._at_last is None:
            self._at_last = NewestStates()
        return self._at_last.note(states) or is_first
