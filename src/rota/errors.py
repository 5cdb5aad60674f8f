"""The errors that Rota raises. One base class lets callers and the command line distinguish them from bugs.

Every message gives the value, the place and the remedy, in one line if possible.
"""

from __future__ import annotations


class RotaError(Exception):
    """Base of every error that Rota raises on purpose."""


class FormatError(RotaError):
    """A file or text is malformed; the message names the file, the field and the value."""


class PlacementError(RotaError):
    """Costs, cluster and placement do not fit together."""


class ScheduleError(RotaError):
    """A schedule is not defined for this placement or number of micro-batches."""


class SearchError(RotaError):
    """The request cannot be searched, or nothing was found."""


class NothingFitsError(SearchError):
    """No plan fits in memory, or none was found; the message says what would help."""


class PlanError(RotaError):
    """A plan that must not run.

    Attributes:
        reason: One of "unknown", "duplicate", "wrong rank", "missing", "cycle", "memory", see `rota.check`; or
            "device order", see `rota.check_device_order`.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class SplitError(RotaError):
    """A model cannot be cut as requested."""


class PipelineError(RotaError):
    """A plan, a model and a batch do not fit together, or a run went wrong."""


class UsageError(PipelineError):
    """An argument, file or device cannot be used: nothing was tried."""


class EstimateError(UsageError):
    """The times of a model cannot be estimated: its operations need data, or nothing is known about the device."""


class LostRankError(PipelineError):
    """Another rank was lost, and the first error is on that rank.

    Attributes:
        lost: Which rank was lost, and when.
        first_error: The error that this rank reported before it was lost; empty if none.
    """

    def __init__(self, lost: str) -> None:
        super().__init__(lost)
        self.lost, self.first_error = lost, ""

    def __str__(self) -> str:
        first = self.first_error
        return f"{self.lost}: {f'the first error was that of {first}' if first else 'look there for the first error'}"
