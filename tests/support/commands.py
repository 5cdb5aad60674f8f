"""Commands of a page or an example, without paying for new processes that import torch and more.

`rota run` and torchrun run their script on the processes of the pool, any other `rota` command runs in this process.
How the command line starts processes is tested with real ones, such as in tests/cli/test_run.py.
"""

import io
import os
import runpy
import shlex
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rota import Plan
from rota.cli import main
from rota.runtime.environment import MESH
from rota.runtime.launcher_files import write_plan
from support.pool import Pool


def output_of(pool: Pool, folder: Path, command: str) -> str:
    """What `command` prints in `folder`: `rota …`, `torchrun --nproc-per-node N SCRIPT …` or `python SCRIPT …`."""
    match shlex.split(command):
        case ["python", *script]:
            return _on_pool(pool, 1, folder, script, {})
        case ["torchrun", "--nproc-per-node", num_processes, *script]:
            environment = {"WORLD_SIZE": num_processes}
            return _on_pool(pool, int(num_processes), folder, script, environment)
        case ["rota", "run", "--mesh", mesh, plan, *script]:
            sizes = {name: int(size) for name, size in (part.split("=") for part in mesh.split(","))}
            return _rota_run(pool, folder, plan, script, sizes)
        case ["rota", "run", plan, *script]:
            return _rota_run(pool, folder, plan, script, {})
        case ["rota", *arguments]:
            printed = io.StringIO()
            with chdir(folder), redirect_stdout(printed):
                assert main(arguments) == 0
            return printed.getvalue()
    raise AssertionError(f"no command: {command}")


def _rota_run(pool: Pool, folder: Path, plan: str, script: list[str], sizes: dict[str, int]) -> str:
    given = Plan.from_json((folder / plan).read_text())
    mesh = {"pp": given.num_ranks, "dp": 1, "tp": 1} | sizes
    num_processes = mesh["pp"] * mesh["dp"] * mesh["tp"]
    exchanged = folder / ".rota-run"
    exchanged.mkdir(exist_ok=True)
    environment = {"WORLD_SIZE": str(num_processes), MESH: f"{mesh['dp']} {mesh['pp']} {mesh['tp']}"}
    environment |= write_plan(given, str(exchanged))
    return _on_pool(pool, num_processes, folder, script, environment)


def _on_pool(pool: Pool, num_processes: int, folder: Path, script: list[str], environment: dict[str, str]) -> str:
    return "".join(pool.run(num_processes, _run_script, folder, script, environment))


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _run_script(rank: int, folder: Path, script: list[str], environment: dict[str, str]) -> str:
    """Run it as `__main__`, and leave the process as it was."""
    import torch
    import torch.distributed as dist

    own: dict[str, Any] = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if environment else {}
    path, modules = [str((folder / script[0]).parent), *sys.path], {*sys.modules}
    printed = io.StringIO()
    torch.manual_seed(0)
    try:
        with (
            chdir(folder),
            patch.dict(os.environ, environment | own),
            patch.object(sys, "argv", script),
            patch.object(sys, "path", path),
            # A script of PyTorch's own starts and ends a process group; the pool's processes are in one already.
            patch.multiple(dist, init_process_group=_nothing, destroy_process_group=_nothing),
            redirect_stdout(printed),
        ):
            runpy.run_path(script[0], run_name="__main__")
    finally:
        torch.set_default_dtype(torch.float32)
        for name in {*sys.modules} - modules:  # another script may have its own of that name
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{folder}{os.sep}"):
                del sys.modules[name]
    return printed.getvalue()
