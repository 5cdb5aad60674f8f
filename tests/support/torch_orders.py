"""PyTorch's pipeline schedules, asked without processes: what they compute, and what they take."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from rota.core.plan import Plan

theirs = pytest.importorskip("torch.distributed.pipelining.schedules")


def fake_stages(num_ranks: int, stages_per_rank: int, rank: int = 0) -> list[Any]:
    """As much of a rank's stages as PyTorch's schedules look at before they run."""
    sizes = {"num_stages": num_ranks * stages_per_rank, "group_size": num_ranks, "group_rank": rank, "submod": None}
    return [SimpleNamespace(stage_index=rank + i * num_ranks, **sizes) for i in range(stages_per_rank)]


def torch_actions(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[list[Any]] | None:
    """For each rank the `_Action`s, None for idle time, of PyTorch's class `name`; None where it refuses the sizes.

    PyTorch's constructor runs as it is, but does not add communication, which takes most of its time.
    """
    with patch.object(theirs._PipelineScheduleRuntime, "_prepare_schedule_with_comms"):
        try:
            schedule = getattr(theirs, name)(fake_stages(num_ranks, stages_per_rank), num_microbatches)
        except ValueError:
            return None
    return [schedule.pipeline_order[rank] for rank in range(num_ranks)]


def torch_orders(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[list[str]] | None:
    """The same as text, without idle time: "2F0"; pairs are two."""
    actions = torch_actions(name, num_ranks, stages_per_rank, num_microbatches)
    if actions is None:
        return None
    return [[str(op) for action in order if action for op in action.sub_actions or [action]] for order in actions]


def with_waits(csv: str) -> str:
    """As PyTorch from 2.15 on reads it: with a wait at the end for each send, and one behind each reduction."""
    if not hasattr(theirs, "_add_wait_send") or "WAIT" in csv:
        return csv
    csv = re.sub(r"(\d+)REDUCE_GRAD", r"\1REDUCE_GRAD,\1WAIT_REDUCE_GRAD", csv)
    waits = (re.sub(r"\d+SEND_", lambda cell: cell[0].replace("SEND", "WAIT_SEND"), line) for line in csv.splitlines())
    at_end = (",".join(cell for cell in line.split(",") if "WAIT_SEND" in cell) for line in waits)
    return "\n".join(",".join(filter(None, (line, wait))) for line, wait in zip(csv.splitlines(), at_end, strict=True))


def load(text: str, plan: Plan, folder: Path, form: str = "compute_only") -> Any:
    """PyTorch's runtime after its own parser, validator and, for "compute_only", addition of communication."""
    path = folder / "plan.csv"
    path.write_text(text if form == "compute_only" else with_waits(text))
    stages = fake_stages(plan.num_ranks, plan.num_stages // plan.num_ranks)
    runtime = theirs._PipelineScheduleRuntime(stages, plan.num_microbatches)
    runtime._load_csv(str(path), format=form)
    homes = {stage: plan.placement.ranks_of(stage)[0] for stage in plan.placement.stages}
    assert runtime.stage_index_to_group_rank == homes
    return runtime


def flat(actions: list[Any]) -> list[Any]:
    """Pairs as two."""
    return [part for action in actions for part in action.sub_actions or [action]]


def simulates(runtime: Any) -> None:
    """PyTorch's own dry run, which knows neither pairs nor REDUCE_GRAD nor waits."""
    actions = {
        rank: [action for action in flat(order) if not re.search("REDUCE_GRAD|WAIT_SEND", str(action))]
        for rank, order in runtime.pipeline_order_with_comms.items()
    }
    theirs._simulate_comms_compute(actions, runtime.stage_index_to_group_rank.get, runtime._num_stages)


class Recorder:
    """A stage that writes down what PyTorch's runtime asks of it."""

    submod = None

    def __init__(self, plan: Plan, index: int, rank: int, done: list[str]) -> None:
        self.stage_index, self.done = index, done
        self.num_stages, self.group_size, self.group_rank = plan.num_stages, plan.num_ranks, rank
        self.is_first, self.is_last = index == 0, index == plan.num_stages - 1

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        def asked(number: int, *_: object, full_backward: bool = False, **__: object) -> list[Any]:
            names = {"forward_one_chunk": "F", "backward_weight_one_chunk": "W", "perform_reduce_grad": "REDUCE_GRAD"}
            names["backward_one_chunk"] = "B" if full_backward else "I"
            if name in names:
                self.done.append(f"{self.stage_index}{names[name]}{number}")
            return []

        return asked


def runs(plan: Plan, path: Path) -> None:
    """PyTorch's runtime does a "compute_comms" file, each rank by itself: nothing is sent, but it insists that what
    it reads was received, and only once."""
    text = path.read_text()
    path.write_text(with_waits(text))
    for rank, line in enumerate(text.splitlines()):
        done: list[str] = []
        stages = [Recorder(plan, stage, rank, done) for stage in plan.placement.stages_on(rank)]
        runtime = theirs._PipelineScheduleRuntime(stages, plan.num_microbatches)
        runtime._load_csv(str(path), format="compute_comms")
        runtime._has_backward = True  # without a loss function, it would leave reductions out
        with patch.object(runtime, "_initialize_stages"):
            runtime._step_microbatches()
        expected = list(map(str, flat(list(map(theirs._Action.from_str, line.split(","))))))
        scaled = [f"{each}{plan.num_microbatches}" if "REDUCE_GRAD" in each else each for each in expected]
        assert done == [each for each in scaled if not re.search("SEND|RECV|WAIT", each)]
