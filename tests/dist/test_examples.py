"""Each example trains on four processes as it does on one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def output_of(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    told = output_of(tmp_path, *TORCHRUN, str(example))
    alone = output_of(tmp_path, str(example))
    losses = [float(loss) for loss in re.findall(r"loss (\S+?)[,\n]", alone)]
    assert len(losses) >= 10
    assert losses[-1] < 0.9 * losses[0]
    numbers, expected = ([float(n) for n in re.findall(r"\d+\.\d+", text)] for text in (told, alone))
    assert numbers == pytest.approx(expected, abs=2e-9)


def test_there_are_examples() -> None:
    assert {example.stem for example in EXAMPLES} == {"bidirectional", "image_text", "vocabulary_parallel_gpt"}
