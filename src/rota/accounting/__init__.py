"""Why idle: every idle microsecond of every rank by its cause, in words, and what would help."""

from __future__ import annotations

from rota.accounting.causes import Cause, Idle
from rota.accounting.explaining import Explanation, explain
from rota.accounting.helping import Suggestion
from rota.accounting.idling import idle

__all__ = ["Cause", "Explanation", "Idle", "Suggestion", "explain", "idle"]
