"""The whole model's weights and buffers, under its names, independent of the cut; and gathering them.

stage 0: embedding.weight ──┐ tied
stage 3: head.weight      ──┴──▶ "embedding.weight", and "head.weight" is its alias
a stage on 4 ranks, or tp=4: w ──▶ "w#0" … "w#3", one TP shard per rank
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rota.core.errors import PipelineError
from rota.core.reading import printable
from rota.models import Stages
from rota.runtime.faults.watchdog import PATIENT
from rota.runtime.reducing.replicas import replicated_parameters
from rota.runtime.transport import collective, receive_value, send_value
from rota.torch_internals import own_state

if TYPE_CHECKING:
    from rota.runtime.pipeline import Pipeline

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and PyTorch's checkpoint wrapper


class Weight(NamedTuple):
    """A weight or buffer: all its names (it is saved under the first), its number of TP shards, and its stages."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    num_tp_shards: int
    stages: tuple[int, ...]

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer, not a parameter."""
        return not isinstance(self.tensor, nn.Parameter)

    def key(self, name: str, tp_shard: int) -> str:
        """The key of this TP shard, if `name` is the weight's name in the checkpoint."""
        return name if self.num_tp_shards == 1 else f"{name}#{tp_shard}"


def model_key(key: str) -> str:
    """The key of a weight or buffer among all tensors of a checkpoint."""
    return f"model/{key}"


def few(names: Iterable[str]) -> str:
    """Up to eight names, which may be those of a file that is not trusted, for an error message."""
    texts = [printable(name if len(name) <= 200 else f"{name[:197]}...") for name in names]
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")


class Weights:
    """The whole model's weights and buffers, in its order. Raises PipelineError if a module's state cannot be saved."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.all = [*_weights(pipeline)]
        self._local = [*self._with_shards()]
        self._known: set[tuple[nn.Module, str]] = set()  # all names that modules of this rank have
        self._places: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}  # of the buffers on this rank
        for _, module, name, tensor in self._here():
            self._known.add((module, name))
            if not isinstance(tensor, nn.Parameter):
                self._places.setdefault(tensor, []).append((module, name))

    def _here(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        """All state on this rank: a module's path in its stage, the module, and the name and value of its state."""
        for stage in self._pipeline.local_stages.values():
            for path, module in stage.named_modules():
                for name, tensor in own_state(module):
                    yield path, module, name, tensor

    def local(self) -> Iterator[tuple[Weight, int]]:
        """The weights on this rank as they are now, each with the number of this rank's TP shard."""
        return ((self._as_it_is(weight), shard) for weight, shard in self._local)

    def _with_shards(self) -> Iterator[tuple[Weight, int]]:
        pipeline, processes = self._pipeline, self._pipeline.processes
        for weight in self.all:
            if here := [stage for stage in weight.stages if stage in pipeline.local_stages]:
                position = sorted(pipeline.plan.placement.ranks_of(here[0])).index(pipeline.rank)
                yield weight, position * processes.num_tp_shards + processes.tp_shard

    def _as_it_is(self, weight: Weight) -> Weight:
        """A forward may give a buffer another tensor: `self.mean = 0.9 * self.mean + 0.1 * x.mean()`."""
        if not weight.is_buffer:
            return weight
        tensors = [getattr(module, name) for module, name in self._places[weight.tensor]]
        if any(tensor is not tensors[0] for tensor in tensors) or not isinstance(tensors[0], torch.Tensor):
            raise PipelineError(
                f"the buffer {weight.names[0]} was one tensor in {len(tensors)} modules, and is not any more; write "
                f"into it (copy_), or make a buffer of each"
            )
        return weight if tensors[0] is weight.tensor else weight._replace(tensor=tensors[0])

    def require_all(self) -> None:
        """Raises PipelineError if a module of this rank has got a weight or buffer since, which would be lost."""
        for path, module, name, _ in self._here():
            if (module, name) not in self._known:
                raise PipelineError(
                    f"{_join(path, name)} of a {type(module).__name__} is newer than the Checkpoints, so that it would "
                    f"be lost; make it in the module's __init__"
                )


def _weights(pipeline: Pipeline) -> Iterator[Weight]:
    stages, placement = pipeline.stages, pipeline.plan.placement
    replicated = {*replicated_parameters(stages, range(len(stages)))}
    of_stages: dict[torch.Tensor, list[int]] = {}
    for stage, module in enumerate(stages.modules):
        for _, tensor in _saved(module):
            of_stages.setdefault(tensor, []).append(stage)
    for tensor, names in names_of(stages).items():
        num_tp_shards = len(placement.ranks_of(of_stages[tensor][0])) * pipeline.processes.num_tp_shards
        whole = tensor in replicated or isinstance(tensor, DTensor)  # a DTensor is saved as one whole tensor
        yield Weight(names, tensor, 1 if whole else num_tp_shards, tuple(of_stages[tensor]))


def names_of(stages: Stages) -> dict[torch.Tensor, tuple[str, ...]]:
    """All names of each weight and buffer; the first is that of `Stages.named_parameters`, without wrappers' names."""
    named = [
        (stage, stages.name_in_model(stage, name), tensor)
        for stage, module in enumerate(stages.modules)
        for name, tensor in _saved(module)
    ]
    kinds = [[entry for entry in named if isinstance(entry[2], nn.Parameter) is wanted] for wanted in (True, False)]
    by_tensor: dict[torch.Tensor, tuple[str, ...]] = {}
    taken: dict[str, torch.Tensor] = {}
    for kind in kinds:
        clash = len({name for _, name, _ in kind}) < len({(name, tensor) for _, name, tensor in kind})
        for stage, name, tensor in kind:
            full = f"{stage}.{name}" if clash else name
            if taken.setdefault(full, tensor) is not tensor:
                raise PipelineError(f"a buffer and a weight are both named {full!r}; rename one to save checkpoints")
            by_tensor[tensor] = tuple(dict.fromkeys((*by_tensor.get(tensor, ()), full)))
    return by_tensor


def _saved(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `module.state_dict()`, each under all its names, without wrappers' names."""
    paths = {"": ""}
    for path, inner in module.named_modules(remove_duplicate=False):
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            raise PipelineError(
                f"module {path!r}, a {type(inner).__name__}, has extra state (get_extra_state), which "
                f"checkpoints do not save; keep it in buffers"
            )
        if path:
            parent, _, last = path.rpartition(".")
            paths[path] = paths[parent] if last in _WRAPPED else _join(paths[parent], last)
        yield from ((_join(paths[path], name), tensor) for name, tensor in own_state(inner))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# --- on one process ---------------------------------------------------------------------------------------------------


def gather_weights(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """Copies of the whole model's weights and buffers, on the CPU of the first process. Collective.

    Args:
        pipeline: Its stages have them, under the names of the unsplit model where `split` made them.

    Returns:
        What the unsplit model's `load_state_dict` takes; a tied weight has all its names. Empty on all other processes.

    Raises:
        PipelineError: Weights are in TP shards.
    """
    weights = Weights(pipeline)
    if sharded := [weight.names[0] for weight in weights.all if weight.num_tp_shards > 1]:
        raise PipelineError(
            f"{sharded[0]} is in TP shards, and Rota does not know how its module joins them; join them in your script"
        )
    processes, process = pipeline.processes, dist.get_rank()
    here = {weight.names[0]: weight.tensor.detach() for weight, _ in weights.local()}
    gathered: dict[str, torch.Tensor] = {}
    with pipeline.watching("the other ranks to gather the weights", PATIENT), collective("gathering the weights"):
        for weight in weights.all:
            name = weight.names[0]
            value = here.get(name)
            if isinstance(value, DTensor):
                value = value.full_tensor()  # of all replicas together
            owner = processes.pipelines[0][pipeline.plan.placement.ranks_of(weight.stages[0])[0]]
            if process == owner and not processes.is_first:
                send_value(value, name, processes.pipelines[0][0], processes.everyone)
            elif processes.is_first:
                if process != owner:
                    value = receive_value(owner, processes.everyone, torch.device("cpu"))
                assert value is not None
                gathered |= dict.fromkeys(weight.names, value.to("cpu", copy=True))
    return gathered
