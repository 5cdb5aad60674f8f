"""How far a script has come: what tells a run that goes on from one that repeats the same steps without end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
