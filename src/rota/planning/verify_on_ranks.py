"""What `rota verify` starts on each rank of a plan: it makes the model, and compares it with the unsplit one.

python verify_on_ranks.py OPTIONS.json, by `rota.runtime.launching`; the first process writes the report beside it.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from rota.core import reading
from rota.core.errors import FormatError, PipelineError, RotaError
from rota.core.plan import Plan
from rota.models import Stages, split
from rota.planning.model_file import ModelFile, load_model_file
from rota.runtime import Pipeline, given_plan, local_device, local_stages, materialize, mesh
from rota.runtime.launching.launch import Launch, launch
from rota.runtime.launching.run_folder import run_folder
from rota.verifying import Verification, verify


@final
@dataclass(frozen=True, slots=True)
class Options:
    """What `rota verify` was asked for: as `rota.verify` and `launch` take it.

    `rows`: of a micro-batch, `length`: tokens of each.
    """

    model: str
    rows: int
    against: str = "batch"
    fp64: bool = True
    timeout_s: float | None = None
    length: int | None = None


def verify_plan(plan: Plan, options: Options) -> Verification:
    """Run the plan once on as many processes as it has, replicas included, and compare.

    Raises FormatError if the model cannot be made, or not be cut as the plan says; PipelineError if a process fails.
    """
    with run_folder("rota-verify-") as folder:
        path = Path(folder.path, "options.json")
        path.write_text(json.dumps(asdict(options)))
        how = Launch(dp=plan.num_replicas, timeout_s=options.timeout_s)
        try:
            launch(plan, __file__, [str(path)], how, partial(print, "rota verify:", file=sys.stderr, flush=True))
        except PipelineError:
            if _refusal_file(path).exists():
                raise FormatError(_refusal_file(path).read_text()) from None
            raise
        return Verification.from_fields(reading.load(_report_file(path).read_text()))


def _report_file(options: Path) -> Path:
    return options.with_name("report.json")


def _refusal_file(options: Path) -> Path:
    """Why the model cannot be cut; the ranks then end without a step."""
    return options.with_name("refusal.txt")


def main(path: str) -> None:
    """On one rank."""
    options = Options(**json.loads(Path(path).read_text()))
    plan, processes = given_plan(), mesh()
    file = load_model_file(options.model, options.length)
    try:
        stages = _stages(file, plan, options.rows)
    except RotaError as error:  # the same on all ranks
        if dist.get_rank() == 0:
            _refusal_file(Path(path)).write_text(str(error))
        return
    materialize(stages, local_stages(plan, processes), local_device())
    stages.unsplit = partial(_unsplit, file)
    logging.getLogger("rota.verifying").setLevel(logging.INFO)
    logging.basicConfig(format="rota verify: %(message)s")
    with Pipeline(stages, plan, file.loss_fn, mesh=processes) as pipeline:
        torch.manual_seed(1 + pipeline.replica)  # the same batch on all ranks of a replica
        num_samples = len({*plan.placement.sample_of}) or plan.num_microbatches
        batch = file.made_batch(options.rows * num_samples)
        against: Any = options.against
        verification = verify(pipeline, *batch, fp64=options.fp64, against=against)
        if pipeline.rank == pipeline.replica == 0:
            _report_file(Path(path)).write_text(json.dumps(verification.to_fields()))


def _stages(file: ModelFile, plan: Plan, rows: int) -> Stages:
    torch.manual_seed(0)
    model, example = file.made_model(), file.made_batch(rows)[0]
    try:
        return split(model, plan.num_stages, plan.cuts, example=example)
    except RotaError as error:
        raise FormatError(f"{file.path} cannot be cut as the plan says: {error}") from error


def _unsplit(file: ModelFile) -> nn.Module:
    torch.manual_seed(0)
    if file.make_unsplit is not None:
        return file.make_unsplit()
    model = file.made_model()
    stages = model if isinstance(model, Stages) else Stages([model])
    materialize(stages, range(len(stages)))
    return Unsplit(stages) if isinstance(model, Stages) else model


@final
class Unsplit(nn.Module):
    """Stages made by hand as one module: what is `weight` in stage 3 is `3.weight` here."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self._stages = stages
        for stage, module in enumerate(stages.modules):
            self.add_module(str(stage), module)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the last stage returns."""
        return self._stages.run(named or inputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
