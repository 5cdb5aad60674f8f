"""The code and the commands of docs/other-trainers.md run, but for DeepSpeed's, which needs processes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rota.cli import main
from rota.errors import PipelineError
from support import ROOT

PAGE = (ROOT / "docs" / "other-trainers.md").read_text()
MODEL, CONFIG, ORDER, TITAN, MEGATRON, DEEPSPEED = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def run(code: str) -> dict[str, object]:
    space: dict[str, object] = {"__name__": "example"}
    exec(compile(code, "docs/other-trainers.md", "exec"), space)
    return space


def test_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    told = []
    commands = re.findall(r"^    (rota .*)$", PAGE, flags=re.MULTILINE)
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command
        told.append(capsys.readouterr().out)
    assert len(commands) == 10
    (arguments,) = re.findall(r"^    (--num-layers .*)$", PAGE, flags=re.MULTILINE)
    assert arguments in told[5]
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()

    config = SimpleNamespace(parallelism=SimpleNamespace())
    run(CONFIG)["planned"](config)  # type: ignore[operator]
    assert config.parallelism.num_pp_microbatches == 8
    assert config.parallelism.pipeline_parallel_module_fqns_per_model_part[3] == [
        "layers.6",
        "layers.7",
        "norm",
        "output",
    ]
    assert "with the messages that it derives: " in told[3]
    assert "with the CSV's messages: " in told[4]
    pipeline = run(ORDER)["in_planned_order"](lambda parts: (SimpleNamespace(), parts))  # type: ignore[operator]
    with pytest.raises(PipelineError, match="a SimpleNamespace runs no schedule CSV with communication"):
        pipeline([])
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
