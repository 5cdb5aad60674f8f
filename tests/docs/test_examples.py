"""Each example trains on four processes as it does on one, by the commands in its docstring."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

pytestmark = pytest.mark.dist

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROGRAMS = {"python": (), "rota": ("-m", "rota"), "torchrun": ("-m", "torch.distributed.run", "--standalone")}


def commands(example: Path) -> list[list[str]]:
    """Those of its docstring, a line each; what they do stands behind some spaces."""
    told = ast.get_docstring(ast.parse(example.read_text())) or ""
    lines = [re.split(r" {3,}", line)[0].split() for line in told.splitlines()]
    return [line for line in lines if line and line[0] in PROGRAMS]


def output_of(folder: Path, program: str, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    given = [str(ROOT / argument) if argument.startswith("examples/") else argument for argument in arguments]
    done = subprocess.run(
        [sys.executable, *PROGRAMS[program], *given],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)  # the limits of its commands together
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    *before, on_several, on_one = commands(example)
    assert on_one == ["python", f"examples/{example.name}"]
    for command in before:
        output_of(tmp_path, *command)
    told, alone = (output_of(tmp_path, *command) for command in (on_several, on_one))
    losses = [float(loss) for loss in re.findall(r"loss (\S+?)[,\n]", alone)]
    assert len(losses) >= 10
    assert losses[-1] < 0.9 * losses[0]
    numbers, expected = ([float(n) for n in re.findall(r"\d+\.\d+", text)] for text in (told, alone))
    assert numbers == pytest.approx(expected, abs=2e-9)


def test_there_are_examples() -> None:
    assert {example.stem for example in EXAMPLES} == {
        "bidirectional",
        "hf_gpt2",
        "image_text",
        "resnet_digits",
        "vocabulary_parallel_gpt",
    }
