"""Traces of runs on PyTorch's pipeline engine, as timelines. Reading them needs no torch."""

from __future__ import annotations

from rota.interop.traces.importing import ImportedTrace, import_traces

__all__ = ["ImportedTrace", "import_traces"]
