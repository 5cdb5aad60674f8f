"""PipelineModule: a list of layers, cut into stages of which this process builds and trains its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from rota.compat.deepspeed.partition import partition
from rota.compat.deepspeed.plans import MakeSchedule, to_plan
from rota.compat.deepspeed.schedule import TrainSchedule
from rota.compat.deepspeed.specs import Layer, LayerSpec, TiedLayerSpec, build, on_meta, refuse_unfit
from rota.compat.deepspeed.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from rota.errors import PipelineError
from rota.models import Stages
from rota.runtime import Pipeline
from rota.runtime.joining import join

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


class PipelineModule(nn.Module):
    """This process's stage of a model that is a sequence of `layers`, each called with what the one before returns.

    `num_stages`: the other processes are replicas; or a `topology` with an axis 'pipe'. `loss_fn(output, labels)`
    returns a micro-batch's mean loss. A layer's initial weights depend on the random state and its place in the list,
    not on the cut. `seed_layers`: they depend on `base_seed` alone, and each layer's dropout too; `seed_fn(seed)` does
    the seeding. `activation_checkpoint_interval`: so many layers at a time keep their input alone, and run again
    backward; 0 for none. `partition_method`: see `partition`; for "profile" give a micro-batch's `profile_input`.

    Before `train_batch`, set what it takes: `micro_batches`, the `schedule`, and, unless you step yourself, the
    `optimizer`, `lr_scheduler` and `gradient_clipping`; `initialize` sets them as DeepSpeed does.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        *,
        profile_input: Any = None,
    ) -> None:
        super().__init__()
        join()
        self._grid = PipelineParallelGrid(topology or _topology_of(num_stages))
        self._topo = self._grid.topology()
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.stage_id
        if num_stages not in (None, self.num_stages):
            raise PipelineError(f"num_stages is {num_stages}, but the topology has {self.num_stages}; give one of them")
        self.loss_fn, self.seed_layers, self.base_seed = loss_fn, seed_layers, base_seed
        self.seed_fn = seed_fn or torch.manual_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        given = [*layers]
        refuse_unfit(given)
        #: Stage s has the layers parts[s] to parts[s + 1] - 1.
        self.parts = partition(given, partition_method, self.num_stages, profile_input)
        self.forward_funcs: list[Callable[[Any], Any]] = []
        self.tied_modules = nn.ModuleDict()
        self._build(given)
        #: The model as `rota.Pipeline` takes it; of other stages there is only what is tied.
        self.stages = Stages(self._all_stages(given))
        self.micro_offset = 0
        self.micro_batches = 1
        self.schedule: MakeSchedule = TrainSchedule
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Any = None
        self.gradient_clipping = 0.0
        self._made: tuple[object, Pipeline] | None = None

    # --- layers ---------------------------------------------------------------------------------------------------

    def _build(self, layers: Sequence[Layer]) -> None:
        """The layers of this stage. Ranks draw the same numbers here, so that they stay in step."""
        base = self.base_seed if self.seed_layers else int(torch.randint(2**31, ()))
        keys = [layer.key if isinstance(layer, TiedLayerSpec) else None for layer in layers]
        with torch.random.fork_rng(devices=[]):
            for i in range(*self.parts[self.stage_id : self.stage_id + 2]):
                first = i if keys[i] is None else keys.index(keys[i])
                self.seed_fn(base + first)
                module, function = build(layers[i], self.tied_modules)
                self.forward_funcs.append(function)
                if module is not None and keys[i] is None:
                    self.add_module(str(i), module)

    def _all_stages(self, layers: Sequence[Layer]) -> list[nn.Module]:
        """This module as its stage; for the others what is tied to further stages, under its name there.

        Tied are layers of one key, and layers given as modules that share parameters.
        """
        tied = {layer.key: layer for layer in layers if isinstance(layer, TiedLayerSpec)}
        tied_modules = {key: on_meta(spec) for key, spec in tied.items() if key not in self.tied_modules}
        tied_modules |= self.tied_modules.items()
        users: dict[nn.Parameter, set[int]] = {}
        for i, layer in enumerate(layers):
            if isinstance(layer, nn.Module):
                for parameter in layer.parameters():
                    users.setdefault(parameter, set()).add(i)
        sharing = {i for of_one in users.values() if len(of_one) > 1 for i in of_one}
        stages: list[nn.Module] = []
        for stage in range(self.num_stages):
            other = nn.Module()
            other.tied_modules = nn.ModuleDict()
            for i in range(self.parts[stage], self.parts[stage + 1]):
                layer = layers[i]
                if isinstance(layer, TiedLayerSpec):
                    other.tied_modules.add_module(layer.key, tied_modules[layer.key])
                elif isinstance(layer, nn.Module) and i in sharing:
                    other.add_module(str(i), layer)
            stages.append(self if stage == self.stage_id else other)
        return stages

    def forward(self, forward_input: Any) -> Any:
        """This stage's layers, one after another."""
        self.micro_offset += 1
        num_layers, interval = len(self.forward_funcs), self.activation_checkpoint_interval
        step, again = interval or max(num_layers, 1), interval and torch.is_grad_enabled()
        value = forward_input
        for start in range(0, num_layers, step):
            run = partial(self._run, start, start + step, self.micro_offset)
            value = checkpoint(run, value, use_reentrant=False) if again else run(value)
        return value

    def _run(self, start: int, stop: int, micro_offset: int, value: Any) -> Any:
        for i, function in enumerate(self.forward_funcs[start:stop], start + self.parts[self.stage_id]):
            if self.seed_layers:
                self.seed_fn(self.base_seed * micro_offset + i)
            value = function(value)
        return value

    # --- steps ----------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One step on `micro_batches` pairs `(inputs, labels)`; the mean loss, on every rank. Collective.

        The first and the last stage take theirs from an iterator each, which must yield the same. With an optimizer it
        updates the weights and clears the gradients, else these are added to `.grad`.
        """
        self.train()
        loss = self.pipeline.step(*self._load(data_iter))
        if self.gradient_clipping:
            self.pipeline.clip_grad_norm_(self.gradient_clipping)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return torch.tensor(loss, dtype=torch.float64)

    def eval_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """The mean loss of as many, on every rank, in eval() and without gradients. Collective."""
        return torch.tensor(self.pipeline.evaluate(*self._load(data_iter)), dtype=torch.float64)

    def _load(self, data_iter: Iterator[Any] | None) -> tuple[list[Any] | None, list[Any] | None]:
        """The micro-batches' inputs on the first stage, their labels on the last."""
        if not (self._grid.is_first_stage or self._grid.is_last_stage):
            return None, None
        if data_iter is None:
            raise PipelineError(f"stage {self.stage_id} reads the batch, but data_iter is None; pass it there too")
        inputs, labels = [], []
        for m in range(self.micro_batches):
            pair = next(data_iter, None)
            if pair is None:
                raise PipelineError(f"data_iter ended after {m} of {self.micro_batches} micro-batches; make it go on")
            x, y = pair
            inputs.append((x,))  # one value for the first layer, be it a tuple
            labels.append(y)
        return inputs if self._grid.is_first_stage else None, labels if self._grid.is_last_stage else None

    @property
    def pipeline(self) -> Pipeline:
        """What runs the steps: its plan, timeline and gradients' norm. Made anew for another schedule. Collective."""
        wanted = self.schedule, self.micro_batches
        if self._made is None or self._made[0] != wanted:
            self.close()
            plan = to_plan(self.schedule, self.micro_batches, self.num_stages)
            several = self._topo.world_size() > self.num_stages
            options: dict[str, Any] = {"mesh": self._grid.mesh} if several else {}
            self._made = wanted, Pipeline(self.stages, plan, self.loss_fn, **options)
        return self._made[1]

    def close(self) -> None:
        """End the threads of the pipeline, if there is one."""
        if self._made is not None:
            self._made[1].close()
            self._made = None

    # --- where we are ---------------------------------------------------------------------------------------------

    def topology(self) -> ProcessTopology:
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        return self._grid

    @property
    def is_first_stage(self) -> bool:
        return self._grid.is_first_stage

    @property
    def is_last_stage(self) -> bool:
        return self._grid.is_last_stage


def _topology_of(num_stages: int | None) -> ProcessTopology:
    """Pipelines of `num_stages`, and as many replicas as the processes make."""
    if num_stages is None:
        raise PipelineError("PipelineModule needs num_stages or a topology; give one of them")
    world_size = dist.get_world_size()
    if num_stages < 1 or world_size % num_stages:
        raise PipelineError(f"num_stages is {num_stages}, which does not divide the {world_size} processes")
    return PipeDataParallelTopology(num_stages, world_size // num_stages)
