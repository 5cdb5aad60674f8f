"""Steps of `begin_step`: each rank reads its loss when somebody asks, or when all ranks have it.

step 1 ──▶ handle 1             step 2 ──▶ handle 2                        step 3
└─ nobody asks                  └─ handle.wait(): its loss     └─ begins with what step 1 was refused for
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias, final

from rota.core.errors import PipelineError

Read: TypeAlias = Callable[[], tuple[float, bool]]

_MOST_RUNNING = 2  # so that the device has work while the host begins the next step


@final
class StepHandle:
    """A step that `Pipeline.begin_step` has begun: the device may still be running it."""

    def __init__(self, number: int, read: Read, has_ended: Callable[[], bool]) -> None:
        # `read` waits for its loss, and whether any rank asks to stop, or raises; `has_ended` says without waiting.
        self._number, self._has_ended = number, has_ended
        self._read: Read | None = read
        self._loss, self._asks_to_stop = 0.0, False
        self._refusal: PipelineError | None = None
        self._is_told = False  # its loss, or its refusal, to somebody

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._read is None or self._has_ended()

    def wait(self) -> float:
        """Wait for the step to end; it may be called on only some ranks, and again.

        `pipeline.metrics` are then those of this step, unless those of a later step or evaluation have been read.

        Returns:
            What `step` returns.

        Raises:
            PipelineError: what `step` raises if the loss is not finite or does not fit together. The
                gradients of the step may have been applied by then.
        """
        self._end()
        self._is_told = True
        if self._refusal is not None:
            raise self._refusal
        return self._loss

    def _end(self) -> None:
        """Wait for it to end. What it is refused for is kept for `wait`."""
        if self._read is not None:
            try:
                self._loss, self._asks_to_stop = self._read()
            except PipelineError as error:
                self._refusal = error
            self._read = None  # with all that it holds


@final
class BegunSteps:
    """One rank's steps of `begin_step`. All ranks add the same ones."""

    def __init__(self) -> None:
        self._num_added = 0
        self._steps: deque[StepHandle] = deque()  # as long as somebody must look at them

    def add(self, read: Read, has_ended: Callable[[], bool]) -> StepHandle:
        """A new step, after all others."""
        self._num_added += 1
        self._steps.append(StepHandle(self._num_added, read, has_ended))
        return self._steps[-1]

    def bound(self) -> None:
        """Wait until at most `_MOST_RUNNING` steps are left that have not ended.

        Each of them holds its messages and marks, and a hang is found the later, the further the host has run ahead.
        """
        for step in [step for step in self._steps if not step.is_done][:-_MOST_RUNNING]:
            step._end()

    @property
    def num_open(self) -> int:
        """How many steps are not settled, the same on all ranks."""
        return len(self._steps)

    def num_ended(self) -> int:
        """How many steps have ended, of all that were added. Does not wait."""
        running = next((step for step in self._steps if not step.is_done), None)
        return self._num_added if running is None else running._number - 1

    def settle(self, num_ended: int | None = None) -> bool:
        """Forget the first `num_ended` steps, or all, and wait for them; returns whether any rank asked to stop.

        All ranks must settle the same steps at once.

        Raises:
            PipelineError: one was refused, which nobody has been told yet; later ones are not forgotten then.
        """
        asks_to_stop = False
        while self._steps and (num_ended is None or self._steps[0]._number <= num_ended):
            step = self._steps.popleft()
            if not step._is_told:
                step.wait()
            asks_to_stop |= step._asks_to_stop
        return asks_to_stop
