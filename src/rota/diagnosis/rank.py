"""What each rank of an examination does: one step after the other, each of them collective.

python -m rota.diagnosis.rank FOLDER, by `sessions`; the first rank writes results to the folder as they come
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from rota.diagnosis import measuring
from rota.diagnosis.report import say
from rota.diagnosis.self_test import Case, merged, run_case
from rota.errors import LostRankError, RotaError
from rota.runtime import control
from rota.runtime.faults.watchdog import PATIENT, Watchdog
from rota.runtime.json_messages import all_gather_json, broadcast_json
from rota.runtime.orphans import end_with_parent
from rota.runtime.process_group import join, leave

_LOST = ("closed by peer", "reset by peer", "Broken pipe")  # Gloo, when another rank has ended
OPTIONS, RESULTS, ERROR = "options.json", "results.jsonl", "error.rank"


class Step(NamedTuple):
    """One thing to do: "ranks", "links" (with `sizes`), "clocks" or "case" (with `case`). `about`: in words."""

    do: str
    about: str
    sizes: Sequence[int] = ()
    case: dict[str, Any] | None = None


@final
class Options(NamedTuple):
    """What all ranks are told. `deadline_s`: on the monotonic clock of the first rank."""

    steps: Sequence[Step]
    kind: str  # of the devices
    timeout_s: float
    deadline_s: float

    def to_json(self) -> str:
        """The options as JSON text."""
        return json.dumps(self._asdict())  # steps become lists, as other tuples do

    @classmethod
    def from_json(cls, text: str) -> Options:
        """The options in what `to_json` returned."""
        fields = json.loads(text)
        return cls(**{**fields, "steps": [Step(*step) for step in fields["steps"]]})


#: Called on the first rank with the number of a step, and its result: None when it begins.
Tell = Callable[[int, Any], None]


def do_steps(options: Options, tell: Tell, say: Callable[[str], None]) -> None:
    """Do the steps of the first rank's options, until its deadline. Collective."""
    owns = join(options.timeout_s)
    is_first = dist.get_rank() == 0
    watchdog = Watchdog(options.timeout_s)
    try:
        with watchdog.watching("the other ranks to begin", PATIENT):
            options = Options.from_json(broadcast_json(options.to_json()))
        device = measuring.own_device(options.kind)
        for number, step in enumerate(options.steps):
            with watchdog.watching("the other ranks to begin the next step"):
                if not broadcast_json(time.monotonic() < options.deadline_s):
                    return
            if is_first:
                say(step.about)
                tell(number, None)
            result = _done(step, device, options.timeout_s, watchdog)
            if is_first:
                tell(number, result)
    except BaseException as error:
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST):
            error = LostRankError("lost a rank")  # whose own error, or end, is what to report
        watchdog.fail(error)
        raise error
    finally:
        watchdog.close()
        if owns:
            leave([dist.group.WORLD])


def _done(step: Step, device: torch.device, timeout_s: float, watchdog: Watchdog) -> Any:
    if step.do == "case":
        assert step.case is not None
        mine = run_case(Case(**step.case), device, timeout_s)  # its Pipeline has a watchdog, which knows more
        with watchdog.watching("the other ranks to end the self-test", PATIENT):
            return merged(all_gather_json(mine))
    with watchdog.watching(f"the other ranks: {step.about}"):
        match step.do:
            case "links":
                return measuring.links(device, step.sizes, lambda _: watchdog.tick())
            case "clocks":
                return measuring.clocks()
            case _:
                return measuring.ranks(device)


def main(folder: str) -> None:
    """Run one of the processes that `sessions` starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(2, 1)  # standard output is for the report; NCCL logs there
    end_with_parent(control.connect())
    torch.set_num_threads(1)
    options = Options.from_json(Path(folder, OPTIONS).read_text())
    try:
        with Path(folder, RESULTS).open("a") as results:
            do_steps(options, lambda *told: print(json.dumps(told), file=results, flush=True), say)
    except Exception as error:
        words = str(error) if isinstance(error, RotaError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, RotaError):
            traceback.print_exc()
        is_lost = isinstance(error, LostRankError)
        if not is_lost:
            Path(folder, f"{ERROR}{os.environ.get('RANK', '0')}").write_text(words)
        control.report("lost" if is_lost else "fails", words)
        sys.stderr.flush()
        os._exit(1)  # at once: cleaning up would wait for the other ranks


if __name__ == "__main__":
    main(*sys.argv[1:])
