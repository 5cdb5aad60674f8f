"""Time as watchdogs count it: in these tests it passes only when a test lets it, however fast the machine is."""

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from rota.runtime.faults.watchdog import Watchdog

_LOOK_S = 0.002


@final
class WatchClock:
    """The clock of all watchdogs that this process makes from now on. Their intervals pass when they are let, or due.

    `is_due`: called on a watchdog's thread between intervals; from when it is true, they all pass at once.
    """

    def __init__(self, is_due: Callable[[Watchdog], bool] = lambda _: False) -> None:
        self._is_due, self._num_left = is_due, 0
        #: The watchdogs whose time stands still.
        self.excludes: Callable[[Watchdog], bool] = lambda _: False
        self._none_left = threading.Event()
        original = Watchdog._watch

        def watch(watchdog: Watchdog) -> None:
            watchdog._stop = _Stop(watchdog, watchdog._stop, self)  # type: ignore[assignment]
            original(watchdog)

        Watchdog._watch = watch  # type: ignore[method-assign]

    def let_pass(self, num_intervals: int) -> None:
        """Let a watchdog, the only one that is not excluded, count so many intervals, and wait until it has."""
        self._num_left = num_intervals
        self._none_left.clear()
        self._none_left.wait()

    def passes(self, watchdog: Watchdog) -> bool:
        """Whether an interval has passed."""
        if self.excludes(watchdog):
            return False
        if self._num_left > 0:
            self._num_left -= 1
            return True
        self._none_left.set()
        return self._is_due(watchdog)


@final
class _Stop:
    """A watchdog's event that ends it."""

    def __init__(self, watchdog: Watchdog, event: Any, clock: WatchClock) -> None:
        self._watchdog, self._event, self._clock = watchdog, event, clock

    def set(self) -> None:
        self._event.set()

    def wait(self, interval_s: float | None = None) -> bool:
        while not self._event.is_set():
            if interval_s is not None and self._clock.passes(self._watchdog):
                return False
            self._event.wait(_LOOK_S)
        return True


def once_all_are(folder: Path, rank: int, where: dict[int, str]) -> Callable[[Watchdog], bool]:
    """Time is due once each of the ranks in `where` has been in a state that its pattern matches.

    The state is what a report would tell, such as "waits for 1B1→0B1 from rank 1 for 0.0 s, after 0F3 in step 1".
    """

    missing = {*where}

    def is_due(watchdog: Watchdog) -> bool:
        if rank in missing and re.search(where[rank], watchdog._status().to_words()):
            (folder / f"is there {rank}").touch()
        missing.difference_update([other for other in missing if (folder / f"is there {other}").exists()])
        return not missing

    return is_due


def once_stopped(pid_file: Path) -> Callable[[Watchdog], bool]:
    """Time is due once the process whose id is in the file is stopped, as by SIGSTOP."""

    def is_due(_: Watchdog) -> bool:
        with suppress(OSError):
            return Path(f"/proc/{pid_file.read_text()}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    return is_due
