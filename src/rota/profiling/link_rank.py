"""One of the processes that `rota.profiling.link_processes.links_of_started` starts.

python -m rota.profiling.link_rank FOLDER [REPEATS,MOST_SPREAD,WITHIN_S]
"""

from __future__ import annotations

import json
import os
import sys

import torch

from rota.errors import PipelineError
from rota.profiling.link_processes import lines_file, links_of_launched, write_found, write_refusal
from rota.runtime import control
from rota.runtime.orphans import end_with_parent


def main() -> None:
    """Measure, and hand over what was found."""
    end_with_parent(control.connect())
    torch.set_num_threads(1)
    folder, how = sys.argv[1:]
    repeats, most_spread, within_s = json.loads(how)
    with lines_file(folder).open("a") as lines:
        try:
            found = links_of_launched(repeats, most_spread, lambda line: print(line, file=lines, flush=True), within_s)
        except PipelineError as error:  # all of them refuse together
            if os.environ["RANK"] == "0":
                write_refusal(folder, str(error))
            return
    if found is not None:
        write_found(folder, found)


if __name__ == "__main__":
    main()
