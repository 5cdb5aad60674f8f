"""docs/cluster.md on two "nodes" of this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

pytestmark = pytest.mark.dist

PAGE = ROOT / "docs" / "cluster.md"


@pytest.mark.sweep
def test_two_nodes(tmp_path: Path) -> None:
    page = PAGE.read_text()
    (script,) = re.findall(r"```python\n# train.py\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    (planning,) = re.findall(r"^    rota (plan .*)$", page, flags=re.MULTILINE)
    subprocess.run([sys.executable, "-m", "rota", *planning.split()], cwd=tmp_path, check=True, capture_output=True)
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    running = next(line for line in re.findall(r"^    torchrun (.*)$", page, flags=re.MULTILINE) if "train.py" in line)
    words = running.replace("node0:29500", f"localhost:{port}").split()
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
