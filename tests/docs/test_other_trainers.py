"""The code and the commands of docs/other-trainers.md run, but for DeepSpeed's, which needs processes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rota.cli import main
from rota.core.errors import PipelineError
from support.pages import commands, python_blocks

PAGE = "other-trainers.md"
MODEL, CONFIG, TITAN, MEGATRON, DEEPSPEED = python_blocks(PAGE)


@dataclass
class ModelSpec:
    """The part of torchtitan's that counts here."""

    pipelining_fn: Callable[..., Any]


def run(code: str) -> dict[str, object]:
    space: dict[str, object] = {"__name__": "example"}
    exec(compile(code, "docs/other-trainers.md", "exec"), space)
    return space


def test_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    told = []
    for command in commands(PAGE):
        assert main(shlex.split(command)[1:]) == 0, command
        told.append(capsys.readouterr().out)
    assert len(told) == 10
    (arguments,) = commands(PAGE, "--num-layers")
    assert arguments in told[5]
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()

    parallelism = SimpleNamespace(
        pipeline_parallel_degree=1,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_schedule_csv="",
        pipeline_parallel_microbatch_size=1,
        module_fqns_per_model_part=None,
    )
    spec = ModelSpec(lambda model: (SimpleNamespace(), [model]))
    config = SimpleNamespace(parallelism=parallelism, training=SimpleNamespace(local_batch_size=1), model_spec=spec)
    planned = run(CONFIG)["planned"](config)  # type: ignore[operator]
    assert planned is config
    assert config.training.local_batch_size == 8
    assert config.parallelism.module_fqns_per_model_part[3] == ["layers.6", "layers.7", "norm", "output"]
    assert "with the messages that it derives: " in told[3]
    assert "with the CSV's messages: " in told[4]
    with pytest.raises(PipelineError, match="a SimpleNamespace runs no schedule CSV with communication"):
        config.model_spec.pipelining_fn(run(MODEL)["make_model"]())  # type: ignore[operator]
    try:
        run(TITAN)
    finally:
        sys.modules.pop("model", None)
    assert capsys.readouterr().out == "('layers.6', 'layers.7', 'norm', 'output') True\n"
    run(MEGATRON)
    layout, makespan, num_virtual = capsys.readouterr().out.split()
    assert re.fullmatch(r"Et\*\d\|t\*\d\|t\*\d\|t\*\dL", layout)
    assert int(makespan) > 8 * 3000
    assert num_virtual == "2"
