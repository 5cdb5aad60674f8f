"""PyTorch's own pipeline engine runs an exported plan on CPUs: the route to torchtitan, without torchtitan and GPUs.

rota plan zb_v --ranks 2 --microbatches 4 -o plan.json
rota export torchtitan plan.json --model examples/torch_engine.py:make_model --cuts layers.1,layers.2,layers.3 -o titan
torchrun --nproc-per-node 2 examples/torch_engine.py titan     compares gradients, and traces a step
rota import trace titan/rank0.json.gz titan/rank1.json.gz -o measured.json
"""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.profiler import ProfilerActivity, profile

from rota.interop import schedule_from, torchtitan

DIM, NUM_LAYERS, ROWS = 256, 4, 256
loss_fn = nn.functional.mse_loss


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = {str(i): nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for i in range(NUM_LAYERS)}
        self.layers, self.head = nn.ModuleDict(blocks), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head else x  # other stages have no head


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def make_batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, DIM), torch.randn(rows, DIM)


def part_of(model: nn.Module, names: Collection[str]) -> nn.Module:
    """The model without the modules of other stages, as torchtitan makes it."""
    for name, child in [*model.named_children()]:
        if isinstance(child, nn.ModuleDict):
            for key in [key for key in child if f"{name}.{key}" not in names]:
                del child[key]
        elif name not in names:
            setattr(model, name, None)
    return model


def run_step(schedule: Any, stages: Sequence[PipelineStage]) -> None:
    inputs, targets = make_batch(ROWS)
    is_first, is_last = (any(getattr(stage, which) for stage in stages) for which in ("is_first", "is_last"))
    schedule.step(*[inputs] * is_first, target=targets if is_last else None)


def largest_difference(stages: Sequence[PipelineStage]) -> float:
    """Between the gradients of these stages and those of the unsplit model, relative to the largest gradient."""
    whole = make_model()
    inputs, targets = make_batch(ROWS)
    loss_fn(whole(inputs), targets).backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    here = {name: parameter.grad for stage in stages for name, parameter in stage.submod.named_parameters()}
    return max(float((here[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in here)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loaded = torchtitan.load(folder / "parallelism.json")
    cpu = torch.device("cpu")
    stages = [
        PipelineStage(part_of(make_model(), loaded.parts[stage]), stage, len(loaded.parts), cpu)
        for stage in loaded.plan.placement.stages_on(rank)
    ]
    schedule = schedule_from(folder / "schedule_comms.csv", stages, loaded.plan.num_microbatches, loss_fn)
    run_step(schedule, stages)
    names = ", ".join(str(stage.stage_index) for stage in stages)
    print(f"rank {rank}, stages {names}: gradients differ by {largest_difference(stages):.0e} at most", flush=True)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run_step(schedule, stages)
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
