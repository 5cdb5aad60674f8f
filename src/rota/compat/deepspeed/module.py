"""PipelineModule: a list of layers, cut into stages; each process builds and trains its own stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from rota.compat.deepspeed.layers import Layer, LayerSpec, TiedLayerSpec, build, on_meta, partition, refuse_unfit
from rota.compat.deepspeed.plans import MakeSchedule, to_plan
from rota.compat.deepspeed.schedule import TrainSchedule
from rota.compat.deepspeed.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from rota.core.errors import PipelineError
from rota.models import Stages
from rota.runtime import Pipeline
from rota.runtime.process_group import join

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


class PipelineModule(nn.Module):
    """This process's stage of a model that is a sequence of layers, each called with the output of the previous one.

    A layer's initial weights depend on the random state and on its index, not on the cut.

    `train_batch` reads the attributes `micro_batches`, `schedule`, `optimizer`, `lr_scheduler` and
    `gradient_clipping`. Set them, or call `initialize`, which sets them as DeepSpeed does. Without an optimizer, call
    its `step` yourself.

    Args:
        layers: The layers of the whole model: modules, specs or functions.
        num_stages: The number of stages; the number of replicas follows from the number of processes.
        topology: A topology with an axis 'pipe', instead of `num_stages`.
        loss_fn: Called with (output, labels), it returns the mean loss of a micro-batch.
        seed_layers: Whether each layer's initial weights and dropout depend only on `base_seed` and its index.
        seed_fn: Called with a seed. None: `torch.manual_seed`.
        base_seed: The seed of `seed_layers`.
        partition_method: How layers are cut; see `partition`.
        activation_checkpoint_interval: How many layers at a time store only their input, and run again in the
            backward; 0: no checkpointing.
        profile_input: A micro-batch's input, for the partition method "profile".

    Raises:
        PipelineError: If the number of stages does not fit the processes.
        SplitError: If layers are wrong, or cannot be cut by this method.
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
        all_layers = [*layers]
        refuse_unfit(all_layers)
        #: Stage s has the layers parts[s] to parts[s + 1] - 1.
        self.parts = partition(all_layers, partition_method, self.num_stages, profile_input)
        self.forward_funcs: list[Callable[[Any], Any]] = []
        self.tied_modules = nn.ModuleDict()
        self._build(all_layers)
        #: The model for `rota.Pipeline`; other stages have only what is tied.
        self.stages = Stages(self._all_stages(all_layers))
        self.micro_offset = 0
        self.micro_batches = 1
        self.schedule: MakeSchedule = TrainSchedule
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Any = None
        self.gradient_clipping = 0.0
        self._pipeline: tuple[object, Pipeline] | None = None

    # --- layers ---------------------------------------------------------------------------------------------------

    def _build(self, layers: Sequence[Layer]) -> None:
        """Build this stage's layers. All ranks draw the same random numbers, so that their random states stay equal."""
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
        """Return this module as its own stage; for other stages, their tied layers under the names they have there.

        Layers are tied if they have the same key, or if they are modules that share parameters.
        """
        tied = {layer.key: layer for layer in layers if isinstance(layer, TiedLayerSpec)}
        tied_modules = {key: on_meta(spec) for key, spec in tied.items() if key not in self.tied_modules}
        tied_modules |= self.tied_modules.items()
        users: dict[nn.Parameter, set[int]] = {}
        for i, layer in enumerate(layers):
            if isinstance(layer, nn.Module):
                for parameter in layer.parameters():
                    users.setdefault(parameter, set()).add(i)
        sharing = {i for indices in users.values() if len(indices) > 1 for i in indices}
        stages: list[nn.Module] = []
        for stage in range(self.num_stages):
            module = nn.Module()
            module.tied_modules = nn.ModuleDict()
            for i in range(self.parts[stage], self.parts[stage + 1]):
                layer = layers[i]
                if isinstance(layer, TiedLayerSpec):
                    module.tied_modules.add_module(layer.key, tied_modules[layer.key])
                elif isinstance(layer, nn.Module) and i in sharing:
                    module.add_module(str(i), layer)
            stages.append(self if stage == self.stage_id else module)
        return stages

    def forward(self, forward_input: Any) -> Any:
        """Run this stage's layers, one after the other."""
        self.micro_offset += 1
        num_layers, interval = len(self.forward_funcs), self.activation_checkpoint_interval
        step, checkpointed = interval or max(num_layers, 1), interval and torch.is_grad_enabled()
        value = forward_input
        for start in range(0, num_layers, step):
            run = partial(self._run, start, start + step, self.micro_offset)
            value = checkpoint(run, value, use_reentrant=False) if checkpointed else run(value)
        return value

    def _run(self, start: int, stop: int, micro_offset: int, value: Any) -> Any:
        for i, function in enumerate(self.forward_funcs[start:stop], start + self.parts[self.stage_id]):
            if self.seed_layers:
                self.seed_fn(self.base_seed * micro_offset + i)
            value = function(value)
        return value

    # --- steps ----------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train for one step. Collective.

        With an optimizer it updates the weights and clears the gradients; without one, gradients are added to `.grad`.

        Args:
            data_iter: Yields a pair (inputs, labels) per micro-batch. The first and the last stage each need one, and
                both must yield the same.

        Returns:
            The mean loss, float64, on every rank.

        Raises:
            PipelineError: If `data_iter` is missing, or ends too early.
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
        """Return the mean loss of a step's micro-batches on every rank, in eval() and without gradients. Collective."""
        return torch.tensor(self.pipeline.evaluate(*self._load(data_iter)), dtype=torch.float64)

    def _load(self, data_iter: Iterator[Any] | None) -> tuple[list[Any] | None, list[Any] | None]:
        """Return the micro-batches' inputs on the first stage, and their labels on the last."""
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
            inputs.append((x,))  # one value for the first layer, even if it is a tuple
            labels.append(y)
        return inputs if self._grid.is_first_stage else None, labels if self._grid.is_last_stage else None

    @property
    def pipeline(self) -> Pipeline:
        """The `rota.Pipeline` that runs the steps; replaced if `schedule` or `micro_batches` change. Collective."""
        key = self.schedule, self.micro_batches
        if self._pipeline is None or self._pipeline[0] != key:
            self.close()
            plan = to_plan(self.schedule, self.micro_batches, self.num_stages)
            self._pipeline = key, Pipeline(self.stages, plan, self.loss_fn, mesh=self._grid.mesh)
        return self._pipeline[1]

    def close(self) -> None:
        """Close the pipeline, if there is one."""
        if self._pipeline is not None:
            self._pipeline[1].close()
            self._pipeline = None

    # --- topology -------------------------------------------------------------------------------------------------

    def topology(self) -> ProcessTopology:
        """Return the topology of all processes."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """Return this process's place in the topology, and its groups."""
        return self._grid


def _topology_of(num_stages: int | None) -> ProcessTopology:
    if num_stages is None:
        raise PipelineError("PipelineModule needs num_stages or a topology; give one of them")
    world_size = dist.get_world_size()
    if num_stages < 1 or world_size % num_stages:
        raise PipelineError(f"num_stages is {num_stages}, which does not divide the {world_size} processes")
    return PipeDataParallelTopology(num_stages, world_size // num_stages)
