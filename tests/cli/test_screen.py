"""Progress on standard error: a line every few seconds at most where there is no terminal."""

from __future__ import annotations

import pytest

from rota.cli import screen


@pytest.mark.parametrize(("every_s", "printed"), [(1e6, ""), (-1.0, "starting\nplanning\n")])
def test_progress_without_a_terminal(
    every_s: float, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen, "_EVERY_S", every_s)
    with screen.progress_line() as show:
        show("  starting")
        show("planning")
    assert capsys.readouterr().err == printed
