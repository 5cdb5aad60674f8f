"""Progress on standard error: a line every few seconds where there is no terminal."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from rota.cli import screen


class Lines(io.StringIO):
    """Where progress goes; `waits_for` returns once it was written so often."""

    def __init__(self) -> None:
        super().__init__()
        self._written = threading.Condition()

    def write(self, text: str) -> int:
        with self._written:
            self._written.notify_all()
            return super().write(text)

    def wait_for(self, text: str, times: int) -> None:
        with self._written:
            assert self._written.wait_for(lambda: self.getvalue().count(text) >= times, 60)


def test_the_last_line_is_repeated_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    monkeypatch.setattr(sys, "stderr", lines)
    monkeypatch.setattr(screen, "_EVERY_S", 0.01)
    with screen.progress_line() as show:
        show("  starting")
        lines.wait_for("starting\n", 2)  # although nothing new is shown
        show("planning")
        lines.wait_for("planning\n", 1)
    printed = lines.getvalue()
    assert {*printed.splitlines()} == {"starting", "planning"}
    assert "rota-progress" not in [thread.name for thread in threading.enumerate()]


def test_short_work_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with screen.progress_line() as show:
        show("starting")
    assert capsys.readouterr().err == ""


def test_the_line_ends_with_an_error() -> None:
    with pytest.raises(ValueError, match="it broke"), screen.progress_line():
        raise ValueError("it broke")
    assert "rota-progress" not in [thread.name for thread in threading.enumerate()]
