"""Where a run keeps snapshots: a folder in memory that outlives the ranks. Each rank has a folder of its own there."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rota.runtime.environment import KEPT_MEMORY

_NAME = re.compile(r"([0-9a-f]{16})-([0-9]{1,18})\.safetensors")


class State(NamedTuple):
    """A state that is kept or saved: of which training of the script, and after how many steps."""

    training: str
    step: int

    @property
    def file(self) -> str:
        """The name of its snapshot."""
        return f"{self.training}-{self.step}.safetensors"


def given() -> Path | None:
    """This rank's folder; None if the launcher keeps none, and would not start this rank again."""
    return Path(os.environ[KEPT_MEMORY]) if KEPT_MEMORY in os.environ else None


def states_in(folder: Path) -> set[State]:
    """The states that are whole in a rank's folder."""
    found = map(_NAME.fullmatch, os.listdir(folder))
    return {State(match[1], int(match[2])) for match in found if match}


def common_states(folders: Sequence[Path]) -> set[State]:
    """The states that all ranks hold."""
    return set.intersection(*map(states_in, folders)) if folders else set()
