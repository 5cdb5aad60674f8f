"""Processes that kill themselves at a moment of a step: `deaths.json` lists [step, process, phase], each once.

The phases are the keys of `PHASES`; "joining" and "restoring", in the restart that follows the deaths before it; and
"with K", which also kills process K, and "with supervisor". `dead-N` in the folder has the time of the
Nth death. "stop" and "drop" kill nobody: they stop the process, or the loopback interface, which needs root and a
network namespace. "drop S" starts it again after S seconds; any start of a process does so, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, final

from torch import nn

from rota import Pipeline
from rota.runtime import checkpoints as checkpoints_room
from rota.runtime.checkpoints import snapshots, state


@final
class Deaths:
    """Those of this process, which may be dead in a moment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = int(os.environ["RANK"])
        (folder / f"pid-{self._process}").write_text(str(os.getpid()))
        file = folder / "deaths.json"
        self._all = json.loads(file.read_text()) if file.exists() else []
        self._pipeline: Pipeline | None = None

    def before_joining(self) -> None:
        """A death before the process joins the others, or while it gets its state; and the network is back."""
        if any(
            phase.startswith("drop") and self._mark(number).exists() for number, (_, _, phase) in enumerate(self._all)
        ):
            set_loopback(True)
        for number, phase in self._mine("joining", "restoring"):
            before = [self._mark(other).exists() for other in range(number)]
            if all(before) and before:
                if phase == "joining":
                    self._die(number)
                state.Restoring.finish = partial(self._die, number)  # type: ignore[assignment, method-assign]

    def watch(self, pipeline: Pipeline) -> None:
        """Know the pipeline."""
        self._pipeline = pipeline

    def of_step(self, step: int, optimizer: Any) -> None:
        """Let this process die in its phase of this step, which is about to begin."""
        assert self._pipeline is not None
        for number, phase in self._mine(*PHASES, *self._others()):
            if self._all[number][0] != step:
                continue
            if phase in PHASES:
                PHASES[phase](Here(self._pipeline, optimizer, partial(self._die, number)))
            elif phase.startswith("with "):
                self._kill_others(phase.removeprefix("with "), number)
            else:
                self._stop(phase, number)

    def _others(self) -> list[str]:
        return [phase for _, _, phase in self._all if phase.startswith(("with ", "stop", "drop"))]

    def _mine(self, *phases: str) -> list[tuple[int, str]]:
        return [
            (number, phase)
            for number, (_, process, phase) in enumerate(self._all)
            if process == self._process and phase in phases and not self._mark(number).exists()
        ]

    def _mark(self, number: int) -> Path:
        return self._folder / f"dead-{number}"

    def _kill_others(self, who: str, number: int) -> NoReturn:
        other = os.getppid() if who == "supervisor" else int((self._folder / f"pid-{who}").read_text())
        self._write(number)
        os.kill(other, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def _stop(self, phase: str, number: int) -> None:
        self._write(number)
        if phase == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        set_loopback(False)
        if seconds := phase.removeprefix("drop"):
            time.sleep(float(seconds))
            set_loopback(True)

    def _die(self, number: int, *_: Any, **__: Any) -> NoReturn:
        self._write(number)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def _write(self, number: int) -> None:
        self._mark(number).write_text(str(time.monotonic()))


def set_loopback(is_up: bool) -> None:
    """Set the loopback interface up or down: what is sent then is lost, as in a network that drops."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1  # linux/sockios.h, linux/if.h
    form = "16sh14x"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name, flags = struct.unpack(form, fcntl.ioctl(any_socket, get_flags, struct.pack(form, b"lo", 0)))
        fcntl.ioctl(any_socket, set_flags, struct.pack(form, name, flags | up if is_up else flags & ~up))


# --- the moments of a step --------------------------------------------------------------------------------------------


def _stage(pipeline: Pipeline) -> nn.Module:
    return next(iter(pipeline.local_stages.values()))


class Here(NamedTuple):
    """The process that dies: by `die`, called with whatever a hook gets."""

    pipeline: Pipeline
    optimizer: Any
    die: Callable[..., Any]


def _between(here: Here) -> None:
    here.die()


def _in_forward(here: Here) -> None:
    seen: list[int] = []

    def count(stage: nn.Module, *_: Any) -> None:
        if stage.training:
            seen.append(1)
        if len(seen) == 2:
            here.die()

    _stage(here.pipeline).register_forward_pre_hook(count)


def _in_evaluation(here: Here) -> None:
    _stage(here.pipeline).register_forward_pre_hook(lambda stage, *_: None if stage.training else here.die())


def _in_backward(here: Here) -> None:
    def watch(stage: nn.Module, _: Any, output: Any) -> None:
        if stage.training:
            output.register_hook(here.die)

    _stage(here.pipeline).register_forward_hook(watch)


def _sending(here: Here) -> None:
    """Once it has sent something."""
    send = here.pipeline._engine.here.transport.send

    def send_and_die(*arguments: Any) -> None:
        send(*arguments)
        here.die()

    here.pipeline._engine.here.transport.send = send_and_die  # type: ignore[method-assign]


def _reducing(here: Here) -> None:
    """The gradients of replicas: it was begun, and is not waited for yet."""
    for all_reduce in here.pipeline._engine.gradients._all_reduces.values():
        all_reduce.finish = here.die  # type: ignore[method-assign]


def _exchanging_losses(here: Here) -> None:
    here.pipeline._engine.step_results._totals = here.die  # type: ignore[assignment]


def _before_optimizer(here: Here) -> None:
    here.optimizer.register_step_pre_hook(here.die)


def _after_optimizer(here: Here) -> None:
    here.optimizer.register_step_post_hook(here.die)


def _committing(here: Here) -> None:
    """The state is copied, its file has no name of a step yet."""
    rename = os.rename

    def rename_and_die(source: Path, target: Path) -> None:
        if target.name != snapshots.PARTIAL:
            here.die()
        rename(source, target)

    snapshots.os.rename = rename_and_die


def _saving(here: Here) -> None:
    checkpoints_room.write_file = here.die


PHASES: dict[str, Callable[[Here], None]] = {
    "between": _between,
    "evaluate": _in_evaluation,
    "forward": _in_forward,
    "backward": _in_backward,
    "send": _sending,
    "reduce": _reducing,
    "losses": _exchanging_losses,
    "optimizer": _before_optimizer,
    "after optimizer": _after_optimizer,
    "commit": _committing,
    "save": _saving,
}


# --- which there are --------------------------------------------------------------------------------------------------

#: Deaths that begin once those before them have been dealt with in part: in the restart itself.
RECOVERY = ("joining", "restoring")
#: (process, phase) of deaths at once, and during the recovery from one.
AT_ONCE = (
    (2, "with 0"),
    (3, "forward"),
    (1, "joining"),
    (0, "backward"),
    (2, "restoring"),
)
EVERY = 4


def spread(deaths: Sequence[tuple[int, str]]) -> list[tuple[int, int, str]]:
    """The deaths, `EVERY` steps apart: each a step that evaluates, or, for "save", one that saves."""
    steps, step = [], 0
    for process, phase in deaths:
        step += 0 if phase in RECOVERY else EVERY
        steps.append((step + (EVERY - 1 if phase == "save" else 0), process, phase))
        step += EVERY if phase == "save" else 0
    return steps
