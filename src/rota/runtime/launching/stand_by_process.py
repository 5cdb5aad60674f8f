"""The process that ranks are forked from: it imports, waits, and forks. See `stand_by`.

python -P -m rota.runtime.launching.stand_by_process SOCKET SUPERVISOR WHETHER-FOR-RESTARTS MODULE …

It has one thread, no process group and no device, so that its children begin as a new process does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import sys

from rota.runtime import control, kept_memory
from rota.runtime.huge_pages import lay_in_huge_pages
from rota.runtime.large_copies import forget_variable
from rota.runtime.launching.stand_by import MOST_BYTES, MOST_FILES
from rota.runtime.orphans import end_with_parent


def main() -> None:
    """Import the modules, then fork a rank per request until the supervisor closes the connection."""
    number, supervisor, is_for_restarts, *modules = sys.argv[1:]
    line, parent = socket.socket(fileno=int(number)), int(supervisor)
    os.set_inheritable(line.fileno(), False)
    end_with_parent(parent)
    forget_variable()
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # otherwise each rank's first collection writes to all pages, which copies them
    if is_for_restarts == "True":
        lay_in_huge_pages()  # each fork then takes 4 ms instead of 20 ms
    line.send(json.dumps({"threads": len(os.listdir("/proc/self/task"))}).encode())
    while True:
        data, files, *_ = socket.recv_fds(line, MOST_BYTES, MOST_FILES)
        if not data:
            return
        request = json.loads(data)
        per_rank = len(files) // len(request["environments"])
        of_ranks = [files[i : i + per_rank] for i in range(0, len(files), per_rank)]
        rank = _fork(line, len(of_ranks))
        own = [] if rank is None else of_ranks[rank]
        for file in files:
            if file in own:
                os.set_inheritable(file, False)  # `recv_fds` takes no flags for this
            else:
                os.close(file)
        if rank is not None:
            _run(request["command"], request["environments"][rank], parent, own)
            return


def _fork(line: socket.socket, num_ranks: int) -> int | None:
    """Fork grandchildren, whose ids the supervisor is told; returns this process's number among them, if it is one."""
    read, write = os.pipe()
    try:
        between = os.fork()
    except OSError:
        between = -1
    if not between:
        os.close(read)
        for number in range(num_ranks):
            try:
                is_rank = not os.fork()
            except OSError:
                break
            if is_rank:
                os.setsid()  # before the supervisor knows of it: it ends process groups
                os.write(write, f"{number} {os.getpid()}\n".encode())
                os.close(write)
                line.close()
                return number
        os._exit(0)
    os.close(write)
    with open(read) as told:
        rows = [row.split() for row in told]  # until all of them have closed it
    pids = {int(number): int(pid) for number, pid in rows}
    if between > 0:
        os.waitpid(between, 0)  # now the ranks are the supervisor's children
    line.send(json.dumps({"pids": [pids.get(rank, 0) for rank in range(num_ranks)]}).encode())
    return None


def _run(command: list[str], environment: dict[str, str], supervisor: int, files: list[int]) -> None:
    """Run the module of a command as `python -m` does."""
    if not control.await_start(files[0]):
        os._exit(1)  # the stand-by was killed before it could tell of this process, or the supervisor has ended
    os.environ.update(environment)
    os.environ.update(control.environment_of(files[0], supervisor))
    if files[1:]:
        os.environ.update(kept_memory.environment_of(files[1]))
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()  # or all ranks would draw the same numbers
    module, *arguments = command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
