"""docs/cluster.md on two "nodes" of this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import commands, python_blocks

pytestmark = pytest.mark.dist


@pytest.mark.sweep
def test_two_nodes(tmp_path: Path) -> None:
    (script,) = (block for block in python_blocks("cluster.md") if block.startswith("# train.py"))
    (tmp_path / "train.py").write_text(script)
    (planning,) = commands("cluster.md", "rota plan")
    subprocess.run([sys.executable, "-m", *planning.split()], cwd=tmp_path, check=True, capture_output=True)
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    running = next(line for line in commands("cluster.md", "torchrun") if "train.py" in line)
    words = running.replace("node0:29500", f"localhost:{port}").split()[1:]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", f"--rdzv-conf=is_host={int(node == 0)}", *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        told = [node.communicate(timeout=150)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], told
    assert [bool(re.search(r"^loss \d\.\d{4}$", text, flags=re.MULTILINE)) for text in told].count(True) == 1, told
