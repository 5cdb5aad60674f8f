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
    """Another rank was lost, and the first error is on that rank; or it has ended normally, and this one goes on.

    Attributes:
        lost: Which rank was lost, and when.
        first_error: The error that this rank reported before it was lost; empty if none.
        ended: The rank that had closed its pipeline without an error, and after which step; empty if none.
    """

    def __init__(self, lost: str, doing: str = "") -> None:
        super().__init__(lost, doing)
        self.lost, self._doing = f"{lost} while {doing}" if doing else lost, doing
        self.first_error, self.ended = "", ""

    def __str__(self) -> str:
        if self.first_error:
            return f"{self.lost}: the first error was that of {self.first_error}"
        if self.ended:
            return (
                f"{self.ended}, but this rank goes on{f' ({self._doing})' if self._doing else ''}; give all ranks the "
                f"same number of batches, and make the same calls on all"
            )
        return f"{self.lost}: look there for the first error"


def is_on_all_ranks(error: BaseException) -> bool:
    """Whether what ranks do together raised it on all of them, so that they can go on together."""
    return isinstance(error, PipelineError) and not isinstance(error, LostRankError)


def error_text(error: BaseException) -> str:
    """An error's type and message, as in the last line of a traceback."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def error_line(error: BaseException) -> str:
    """`error_text` without line breaks, for a part of a sentence."""
    return " ".join(error_text(error).split())


def failed_before(error: str) -> str:
    """Why a rank makes no more calls: an `error` of its own, as `error_text` has it, in the middle of one."""
    return (
        f"an earlier call failed on this rank ({error}), which ended the pipeline on all ranks, as the others waited "
        f"for the rest of that call; end this process, and start all ranks again from a checkpoint (rota run "
        f"--max-restarts does so)"
    )
