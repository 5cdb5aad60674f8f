"""torchtitan trains as planned: its config has the plan's cuts and micro-batches, and its messages the plan's order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from rota.core.errors import PipelineError
from rota.interop import torchtitan
from rota.interop.modules import require_parts
from rota.interop.torch_order import keep_order

_SCHEDULE, _MESSAGES, _FIELDS = torchtitan.FILES


def with_plan(config: Any, folder: str | Path) -> Any:
    """Change a Python config of torchtitan so that it trains as planned.

    It sets the fields of `config.parallelism`, the batch size, and turns CUDA graphs off, which torchtitan refuses with
    pipelines. The `pipelining_fn` of `config.model_spec` is wrapped: messages keep the plan's order, and a model with
    other modules is refused. If the plan has several replicas of its pipeline and `data_parallel_shard_degree` is -1,
    torchtitan's default, FSDP shards over them.

    Args:
        config: What a function of a `config_registry` of torchtitan returns, from version 0.3.0 on.
        folder: The folder that `rota export torchtitan` wrote.

    Returns:
        The config.

    Raises:
        FormatError, SplitError, PlanError: As `rota.interop.torchtitan.load`.
        PipelineError: The config lacks what the plan must set, as in other versions of torchtitan, or its degrees of
            data parallelism are for another number of replicas than the plan has; or torchtitan does not pipeline
            the model.
    """
    fields = torchtitan.load(Path(folder, _FIELDS))
    num_microbatches, rows = fields.plan.num_microbatches, fields.microbatch_rows
    parallelism, training = _get(config, "parallelism"), _get(config, "training")
    _set(parallelism, fields.plan.num_ranks, "pipeline_parallel_degree")
    _set(parallelism, fields.schedule, "pipeline_parallel_schedule")
    _set(parallelism, Path(folder, _SCHEDULE).as_posix(), "pipeline_parallel_schedule_csv")
    _set(parallelism, [[*names] for names in fields.parts], *torchtitan.NAMES_OF_PARTS)
    if fields.num_replicas is not None:
        _set_degrees(parallelism, fields.num_replicas)
    if hasattr(parallelism, "num_pp_microbatches"):  # since 0.3.0, batches are counted in tokens
        parallelism.num_pp_microbatches = num_microbatches
        num_tokens = rows * _get(training, "max_context_length")
        _set(training, num_tokens, "num_tokens_per_microbatch_per_dp_rank")
    else:
        _set(parallelism, rows, "pipeline_parallel_microbatch_size")
        _set(training, num_microbatches * rows, "local_batch_size")
    if hasattr(training, "disable_cuda_graphs"):
        training.disable_cuda_graphs = True
    spec = _get(config, "model_spec")
    planned = _in_planned_order(_get(spec, "pipelining_fn"), folder, fields.parts)
    config.model_spec = dataclasses.replace(spec, pipelining_fn=planned)
    return config


def _in_planned_order(
    pipelining_fn: Callable[..., Any], folder: str | Path, parts: torchtitan.Parts
) -> Callable[..., Any]:
    """The `pipelining_fn` of a torchtitan model, whose schedule then runs the plan's messages in the plan's order.

    It raises SplitError if the model's modules are not those of the plan, and what `keep_order` raises.
    """
    if pipelining_fn is None:
        raise PipelineError("torchtitan does not pipeline this model: its pipelining_fn is None; use another model")

    @functools.wraps(pipelining_fn)
    def pipeline(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        require_parts(model, parts)
        schedule, *rest = pipelining_fn(model, *args, **kwargs)
        return keep_order(schedule, Path(folder, _MESSAGES)), *rest

    return pipeline


def _set_degrees(parallelism: Any, num_replicas: int) -> None:
    """Shard over what is left of the replicas, as torchtitan does for -1. Raises PipelineError for another number."""
    replicate, shard = (_get(parallelism, name) for name in torchtitan.DEGREES)
    if shard == -1 and num_replicas % replicate == 0:
        _set(parallelism, num_replicas // replicate, torchtitan.DEGREES[1])
    elif replicate * shard != num_replicas:
        raise PipelineError(
            f"the plan has {num_replicas} replicas of its pipeline, but the config has {torchtitan.DEGREES[0]} = "
            f"{replicate} and {torchtitan.DEGREES[1]} = {shard}: set them so that their product is {num_replicas}, or "
            f"leave both at torchtitan's defaults (1 and -1)"
        )


def _get(section: Any, name: str) -> Any:
    if not hasattr(section, name):
        raise _unknown_version(section, name)
    return getattr(section, name)


def _set(section: Any, value: Any, *names: str) -> None:
    for name in names:
        if hasattr(section, name):
            setattr(section, name, value)
            return
    raise _unknown_version(section, " or ".join(names))


def _unknown_version(section: Any, name: str) -> PipelineError:
    return PipelineError(
        f"torchtitan's {type(section).__qualname__} has no {name}: with_plan knows the configs of version 0.3.0 and "
        f"somewhat later ones; set what {_FIELDS} says by hand"
    )
