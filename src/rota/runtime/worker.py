"""What `rota run` starts on each rank: the user's script, with our own errors told in one line.

python -m rota.runtime.worker SCRIPT [ARGUMENT …]
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import time
import traceback

from rota.errors import LostRankError, RotaError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LET_FIRST_ERROR_BE_SEEN_S = 2.0  # the launcher reports the rank that ended first, and looks every 0.1 s


def main() -> None:
    _end_with_the_launcher()
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    ours = os.path.abspath(script)
    sys.path.insert(0, os.path.dirname(ours))  # as `python SCRIPT` has it
    try:
        runpy.run_path(script, run_name="__main__")
    except RotaError as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == ours]
        place = f" ({script}:{lines[-1]})" if lines else ""
        # In one piece, or ranks that fail together mix their lines.
        sys.stderr.write(f"rota: rank {os.environ.get('RANK', '?')}: {error}{place}\n")
        sys.stderr.flush()
        if isinstance(error, LostRankError):
            time.sleep(_LET_FIRST_ERROR_BE_SEEN_S)
        # Peers may be waiting for this rank: end at once rather than tidy up with them.
        os._exit(1)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # likewise, and before them: the launcher tells who ended first


def _end_with_the_launcher() -> None:
    """Ctrl-C ends a rank at once, even inside a wait; and no rank outlives a launcher that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
