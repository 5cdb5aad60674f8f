"""A rank fails because its peers' node is lost: the loss of the node is what counts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rota import PipelineError
from rota.runtime.launching import launch as launching
from rota.runtime.launching.nodes import NodeLost, Nodes
from rota.runtime.launching.rank_processes import RankFailed

from .test_crew import PLAN, backups_of


class _Leader:
    own_address = "127.0.0.1"
    held: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self, *_: object) -> None:
        self._loss: NodeLost | None = NodeLost(1, "node 1 is lost")

    def __enter__(self) -> _Leader:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self, _: object) -> None:
        pass

    def start(self) -> None:
        if self._loss is None:
            raise RankFailed("no loss was pending", number=0)

    def can_start_on(self, _: int) -> bool:
        return False

    def taken_loss(self) -> NodeLost | None:
        loss, self._loss = self._loss, None
        return loss


class _Ranks:
    saved = ()
    has_pipeline = True

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def fork(self, *_: object) -> None:
        raise RankFailed("rank 0 failed", number=0)


def test_a_pending_loss_of_a_node_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "Leader", _Leader)
    monkeypatch.setattr(launching, "Ranks", _Ranks)
    monkeypatch.setattr(launching, "StandBy", lambda *_: nullcontext())
    monkeypatch.setattr(launching.NodeCrew, "environments", lambda *_: [])
    script = tmp_path / "train.py"
    script.write_text("")
    told: list[str] = []
    nodes = Nodes(2, 0, "127.0.0.1", 1, b"s" * 32)
    with pytest.raises(PipelineError, match="no loss was pending"):
        launching.launch(PLAN, str(script), dp=2, backups=backups_of(PLAN, 2), nodes=nodes, report=told.append)
    assert told[0].startswith("node 1 is lost; its ranks 2 to 3 are done by their peers")
    assert not any("rank 0 failed" in line for line in told)
