"""Every idle microsecond of every rank by its cause, in words, and what would help."""

from __future__ import annotations

from rota.accounting.causes import Cause, Idle
from rota.accounting.explanation import Explanation, explain
from rota.accounting.idle_time import idle
from rota.accounting.suggestions import Suggestion

__all__ = ["Cause", "Explanation", "Idle", "Suggestion", "explain", "idle"]
