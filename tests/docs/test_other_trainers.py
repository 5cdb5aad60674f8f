"""The code and the commands of docs/other-trainers.md run, but for DeepSpeed's, which needs processes."""

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from interop.test_planned_config import Config, Training
from rota import Cluster, Costs, PipelineError, SplitError
from rota.cli import main
from rota.interop import torchtitan
from rota.schedules import NAMED
from support.pages import commands, python_blocks

PAGE = "other-trainers.md"
MODEL, CONFIG, TITAN, MEGATRON, DEEPSPEED = python_blocks(PAGE)


@dataclass
class Spec:
    """The part of torchtitan's `ModelSpec` that counts here."""

    pipelining_fn: Callable[..., Any]
    model_args: Mapping[str, Any] | None = None


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

    config = Config(model_spec=Spec(lambda model: (SimpleNamespace(), [model])))
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


_, PLANNED, OWN_CONFIG = python_blocks("torchtitan.md")


def test_what_is_launched_has_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`planned.py` of the page, with stand-ins for the modules of torchtitan that it imports."""
    monkeypatch.chdir(tmp_path)
    family = NAMED["zb_v"]
    plan = family(family.place(family.adapted(Costs.uniform(4)), Cluster.uniform(2)), 6)
    torchtitan.export([["tok_embeddings"], ["layers.0"], ["layers.1"], ["norm", "lm_head"]], plan, "titan")
    config = Config(model_spec=Spec(lambda model: (None, model)))
    of_llama3 = {
        "llama3_configs": {},
        "model_registry": lambda name: Spec(lambda model: (None, model), {name: llama3.llama3_configs[name]}),
    }
    stand_ins = {
        "torchtitan": {},
        "torchtitan.models": {"llama3": (llama3 := SimpleNamespace(**of_llama3))},
        "torchtitan.models.llama3": vars(llama3),
        "torchtitan.models.llama3.config_registry": {"llama3_8b": lambda: config},
    }
    stand_ins["my_variant"] = {"wide": "a wide Llama"}
    for name, content in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    space: dict[str, Any] = {}
    exec(compile(PLANNED, "docs/torchtitan.md", "exec"), space)
    assert space["llama3_8b_planned"]() is config
    assert config.training == Training(local_batch_size=6, disable_cuda_graphs=True)
    assert config.parallelism.pipeline_parallel_schedule_csv == "titan/schedule.csv"
    planned = config.model_spec
    exec(compile(OWN_CONFIG, "docs/torchtitan.md", "exec"), space)
    assert space["wide_planned"]().model_spec.model_args == {"wide": "a wide Llama"}
    for spec in (planned, config.model_spec):
        with pytest.raises(SplitError, match=r"the plan's parts have 'layers\.0', but ModuleDict has a:"):
            spec.pipelining_fn(nn.ModuleDict({"a": nn.Linear(2, 2)}))
