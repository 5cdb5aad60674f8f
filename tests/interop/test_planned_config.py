"""Configs of torchtitan 0.3 take the plan's cuts and batch, and the model's `pipelining_fn` refuses other models."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from rota import Cluster, Costs, Plan, RotaError
from rota.core.plan import Usage
from rota.interop import torchtitan, with_plan
from rota.schedules import NAMED
from support.plain_gpt import FOUR, GPT


@dataclass(kw_only=True, slots=True)
class Parallelism:
    """The fields of torchtitan 0.3.0 that matter here, with its defaults."""

    pipeline_parallel_degree: int = 1
    module_fqns_per_model_part: list[list[str]] | None = None
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_schedule_csv: str | None = ""
    pipeline_parallel_microbatch_size: int = 1
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1


@dataclass(kw_only=True, slots=True)
class Training:
    local_batch_size: int = 8
    disable_cuda_graphs: bool = False


@dataclass(kw_only=True, slots=True)
class LaterParallelism:
    """The same of torchtitan's main branch after 0.3.0."""

    pipeline_parallel_degree: int = 1
    pipeline_parallel_module_fqns_per_model_part: list[list[str]] | None = None
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_schedule_csv: str | None = ""
    num_pp_microbatches: int = 1
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1


@dataclass(kw_only=True, slots=True)
class LaterTraining:
    num_tokens_per_microbatch_per_dp_rank: int = 2048
    max_context_length: int = 2048
    disable_cuda_graphs: bool = False


@dataclass
class ModelSpec:
    name: str
    pipelining_fn: Any


@dataclass(kw_only=True, slots=True)
class Config:
    parallelism: Any = field(default_factory=Parallelism)
    training: Any = field(default_factory=Training)
    model_spec: ModelSpec = field(default_factory=lambda: ModelSpec("gpt", pipelined))


def pipelined(model: nn.Module, *, loss_fn: object) -> tuple[Any, list[nn.Module], object]:
    return SimpleNamespace(), [model], loss_fn


def exported(folder: Path, num_replicas: int = 1) -> Plan:
    family = NAMED["zb_v"]
    placement = family.place(family.adapted(Costs.uniform(4)), Cluster.uniform(2))
    plan = replace(family(placement, 6), usage=Usage(("a", "b", "c"), 3, num_replicas))
    torchtitan.export(FOUR, plan, folder)
    return plan


def test_a_config_of_0_3_trains_as_planned(tmp_path: Path) -> None:
    exported(tmp_path)
    config = with_plan(Config(), tmp_path)
    assert config.parallelism == Parallelism(
        pipeline_parallel_degree=2,
        module_fqns_per_model_part=[[*names] for names in FOUR],
        pipeline_parallel_schedule="ZBVZeroBubble",
        pipeline_parallel_schedule_csv=(tmp_path / "schedule.csv").as_posix(),
        pipeline_parallel_microbatch_size=3,
    )
    assert config.training == Training(local_batch_size=18, disable_cuda_graphs=True)
    with pytest.raises(RotaError, match="a SimpleNamespace runs no schedule CSV with communication"):
        config.model_spec.pipelining_fn(GPT(), loss_fn=None)


def test_a_config_after_0_3_counts_batches_in_tokens(tmp_path: Path) -> None:
    exported(tmp_path)
    config = with_plan(Config(parallelism=LaterParallelism(), training=LaterTraining()), tmp_path)
    assert config.parallelism.num_pp_microbatches == 6
    assert config.parallelism.pipeline_parallel_module_fqns_per_model_part == [[*names] for names in FOUR]
    assert config.training.num_tokens_per_microbatch_per_dp_rank == 3 * 2048


def test_a_config_shards_over_the_plan_s_replicas(tmp_path: Path) -> None:
    exported(tmp_path, num_replicas=4)
    for replicate, shard, set_shard in ((1, -1, 4), (2, -1, 2), (2, 2, 2), (4, 1, 1)):
        config = Config()
        config.parallelism.data_parallel_replicate_degree = replicate
        config.parallelism.data_parallel_shard_degree = shard
        found = with_plan(config, tmp_path).parallelism
        assert (found.data_parallel_replicate_degree, found.data_parallel_shard_degree) == (replicate, set_shard)
    later = Config(parallelism=LaterParallelism(), training=LaterTraining())
    assert with_plan(later, tmp_path).parallelism.data_parallel_shard_degree == 4
    for replicate, shard in ((1, 2), (3, -1), (8, 1)):
        config = Config()
        config.parallelism.data_parallel_replicate_degree = replicate
        config.parallelism.data_parallel_shard_degree = shard
        with pytest.raises(RotaError, match="the plan has 4 replicas of its pipeline, but the config has data_para"):
            with_plan(config, tmp_path)


def test_what_a_config_lacks_is_named(tmp_path: Path) -> None:
    exported(tmp_path)
    with pytest.raises(RotaError, match="torchtitan's Training has no max_context_length: with_plan knows the configs"):
        with_plan(Config(parallelism=LaterParallelism()), tmp_path)
    with pytest.raises(RotaError, match="LaterTraining has no pipeline_parallel_degree"):
        with_plan(Config(parallelism=LaterTraining()), tmp_path)
    with pytest.raises(RotaError, match="its pipelining_fn is None"):
        with_plan(Config(model_spec=ModelSpec("gpt", None)), tmp_path)
    with pytest.raises(RotaError, match=r"parallelism\.json: No such file"):
        with_plan(Config(), tmp_path / "elsewhere")


def test_a_model_with_other_modules_is_refused_before_it_trains_without_them(tmp_path: Path) -> None:
    exported(tmp_path)
    pipeline = with_plan(Config(), tmp_path).model_spec.pipelining_fn
    model = GPT()
    model.lm_head, model.output = model.output, None
    with pytest.raises(RotaError, match=r"the plan's parts have 'output', but GPT has tok_embeddings, layers\.0"):
        pipeline(model, loss_fn=None)
    model = GPT()
    model.further = nn.Linear(2, 2)
    with pytest.raises(RotaError, match="'further' of GPT is in none of the plan's parts, so torchtitan would leave"):
        pipeline(model, loss_fn=None)
