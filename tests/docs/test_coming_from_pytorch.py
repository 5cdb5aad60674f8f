"""The scripts of docs/coming-from-pytorch.md: on two ranks, the losses are those of the plain loop."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rota.core.errors import FormatError, PipelineError
from rota.planning.model_file import load_exported_model, load_model_file
from support.commands import output_of
from support.pages import commands, python_blocks, text_of
from support.pool import Pool

PAGE = "coming-from-pytorch.md"
BEFORE, AFTER, STARTING, LOADING = python_blocks(PAGE)
GUARD = 'if __name__ == "__main__":'
PLANNING = "rota plan 1f1b --ranks 2 --microbatches 4 -o plan.json"  # autoplan's takes a minute


def exact(script: str) -> str:
    """In float64, and with all digits of the losses."""
    assert ":.3f}" in script
    return f"import torch\n\ntorch.set_default_dtype(torch.float64)\n{script.replace(':.3f}', ':.15f}')}"


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\d+\.\d+", printed)]


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.dist
@pytest.mark.usefixtures("float64")
def test_training_is_that_of_the_plain_loop(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "before.py").write_text(exact(BEFORE))
    (tmp_path / "train.py").write_text(exact(AFTER))
    output_of(pool, tmp_path, PLANNING)
    expected = losses_in(output_of(pool, tmp_path, "python before.py"))
    assert len(expected) == 8  # of four evaluations
    assert expected[-1] < 0.5 * expected[1]
    *_, running, exporting = commands(PAGE)
    assert losses_in(output_of(pool, tmp_path, running)) == pytest.approx(expected, abs=1e-10)

    monkeypatch.chdir(tmp_path)
    output_of(pool, tmp_path, exporting)
    plain = torch.load("checkpoint.pt", weights_only=True)["model"]
    space: dict[str, Any] = runpy.run_path("train.py", run_name="example")
    exec(LOADING, space)
    torch.testing.assert_close(space["model"].state_dict(), plain, rtol=0, atol=1e-10)
    exec(STARTING, space)
    torch.testing.assert_close(space["make_model"]().state_dict(), plain, rtol=0, atol=0)


def test_model_and_loop_in_one_file(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(AFTER)
    assert load_model_file(str(script)).make_optimizer is not None
    with pytest.raises(PipelineError) as caught:
        runpy.run_path(str(script), run_name="__main__")
    assert f"rota.core.errors.PipelineError: {caught.value}" in " ".join(text_of(PAGE).split())
    script.write_text(AFTER.replace(GUARD, "if True:"))
    told = r"train\.py cannot be run: it begins to train \(line \d+\), but .* under `if __name__ == \"__main__\":`"
    for load in (load_model_file, lambda path: load_exported_model(f"{path}:make_model")):
        with pytest.raises(FormatError, match=told):
            load(str(script))
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args(['--steps', '3'])\n")
    with pytest.raises(FormatError, match=r"cannot be run: it ends the process \(line 2\), but is run here for"):
        load_model_file(str(script))
