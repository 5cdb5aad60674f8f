"""What `rota run` starts on each rank: the user's script, with our own errors told in one line.

python -m rota.runtime.worker SCRIPT [ARGUMENT …]
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback

from rota.errors import RotaError


def main() -> None:
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as `python SCRIPT` has it
    try:
        runpy.run_path(script, run_name="__main__")
    except RotaError as error:
        here = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if os.path.abspath(f.filename) == os.path.abspath(script)
        ]
        place = f" ({script}:{here[-1].lineno})" if here else ""
        print(f"rota: rank {os.environ.get('RANK', '?')}: {error}{place}", file=sys.stderr, flush=True)
        # Peers may be waiting for this rank: end at once rather than tidy up with them.
        os._exit(1)


if __name__ == "__main__":
    main()
