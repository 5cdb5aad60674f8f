"""How exactly a thread wakes up from a sleep."""

from __future__ import annotations

import ctypes
import sys

_PR_SET_TIMERSLACK = 29  # linux/prctl.h


def set_timer_slack_ns(slack_ns: int) -> None:
    """Let this thread's sleeps last at most so much longer than asked, elsewhere than on Linux nothing happens.

    The system's default is 50 µs, which a value of 0 restores.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, slack_ns)
