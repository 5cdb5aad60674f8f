"""The page for users of torchtitan: a Llama is planned for GPUs that are not here, and exported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from rota import Cluster, Costs
from rota.core.errors import SplitError
from rota.interop import torchtitan
from rota.schedules import NAMED
from support.pages import python_blocks

_, CONFIG, OWN_CONFIG = python_blocks("torchtitan.md")


@dataclass
class Spec:
    """The part of torchtitan's `ModelSpec` that counts here."""

    pipelining_fn: Callable[..., Any]
    model_args: Mapping[str, Any] | None = None


def test_what_is_launched_has_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`planned.py` of the page, with stand-ins for the modules of torchtitan that it imports."""
    monkeypatch.chdir(tmp_path)
    family = NAMED["zb_v"]
    plan = family(family.place(family.adapted(Costs.uniform(4)), Cluster.uniform(2)), 6)
    torchtitan.export([["tok_embeddings"], ["layers.0"], ["layers.1"], ["norm", "lm_head"]], plan, "titan")
    names = ("degree", "schedule", "schedule_csv", "microbatch_size")
    parallelism = SimpleNamespace(
        **{f"pipeline_parallel_{name}": None for name in names}, module_fqns_per_model_part=None
    )
    training = SimpleNamespace(local_batch_size=1, disable_cuda_graphs=False)
    config = SimpleNamespace(parallelism=parallelism, training=training, model_spec=Spec(lambda model: (None, model)))
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
    exec(compile(CONFIG, "docs/torchtitan.md", "exec"), space)
    assert space["llama3_8b_planned"]() is config
    assert config.training == SimpleNamespace(local_batch_size=6, disable_cuda_graphs=True)
    assert config.parallelism.pipeline_parallel_schedule_csv == "titan/schedule.csv"
    planned = config.model_spec
    exec(compile(OWN_CONFIG, "docs/torchtitan.md", "exec"), space)
    assert space["wide_planned"]().model_spec.model_args == {"wide": "a wide Llama"}
    for spec in (planned, config.model_spec):
        with pytest.raises(SplitError, match=r"the plan's parts have 'layers\.0', but ModuleDict has a:"):
            spec.pipelining_fn(nn.ModuleDict({"a": nn.Linear(2, 2)}))
