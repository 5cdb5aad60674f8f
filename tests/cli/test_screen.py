"""Progress on standard error: a line now and then where there is no terminal."""

from __future__ import annotations

import pytest

from rota.cli.screen import progress_line


def test_a_line_every_few_seconds_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    clock_s = [0.0]
    with progress_line(lambda: clock_s[0]) as show:
        for second in range(13):
            clock_s[0] = float(second)
            show(f"  at {second} s")
    assert capsys.readouterr().err.splitlines() == ["at 5 s", "at 10 s"]
