"""A rank that reports a pipeline and does nothing: `python -m support.silent_worker SCRIPT`. It needs no torch."""

from __future__ import annotations

from rota.runtime import control

if __name__ == "__main__":
    control.connect()
    for event in ("joins", "opens", "closes"):
        control.report(event)
