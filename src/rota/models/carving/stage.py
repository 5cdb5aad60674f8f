"""A stage of an unmodified model: the model's own forward, with the calls of other stages' units answered.

calls before the stage's    answered: with received values, the call's own arguments, or an Absent
the stage's own calls       run; what other stages read of them is kept for sending
the first call after them   ends the forward, except on the last stage, which returns what the model returns
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from rota.core.errors import PipelineError
from rota.models.carving.absent import Absent, absent, absent_like
from rota.models.carving.copies import copy_sharing
from rota.models.carving.cutting import Cutting
from rota.models.carving.recording import Returned
from rota.models.carving.running import Run, Stopped, install
from rota.models.carving.units import flatten, note_names, paths, rebuild, show_whole
from rota.models.randomness import random_state_kept
from rota.torch_internals import compile_alike

SIZES = "shapes of inputs"  # the key under which they travel


class LeftOut:
    """Marks an input that a batch leaves out."""


class StageInputs(NamedTuple):
    """What a stage is called with: values by source, inputs by name, and inputs of which it knows only the shape."""

    sources: tuple[int, ...]
    inputs: tuple[str, ...]
    sized: dict[str, torch.dtype]


@final
class CarvedStage(nn.Module):
    """One stage. It has the parameters and buffers that it owns, under the model's names."""

    def __init__(
        self, model: nn.Module, cutting: Cutting, stage: int, stage_inputs: StageInputs, sizes: list[str]
    ) -> None:
        super().__init__()
        part, recording = cutting.parts[stage], cutting.recording
        here = [(call, recording.call_name(call)) for call in range(part.begin, part.end)]
        root = _copy_owning(model, part.owned)
        self._run, self._stage_inputs = Run(), stage_inputs
        self._draws_idly = recording.draws_idly
        self._can_train, self._is_last = recording.training, stage == len(cutting.parts) - 1
        self._arriving = [
            [(recording.value_name(value), value) for value in cutting.parts[source].sent[stage]]
            for source in stage_inputs.sources
        ]
        self._leaving = {
            target: [(recording.value_name(value), value) for value in values] for target, values in part.sent.items()
        }
        self._sizes, self._needed = tuple(sizes), frozenset(part.needed)
        # Caches: the last stage has all of one or a part, which depends on the cut, so none is returned.
        self._kept_back = recording.result_objects
        #: Weights that no module below belongs to, and the modules that run here, by path; no CutPoints.
        self.holds = (
            *_outside(model, part.owned, {*recording.units}),
            *(name for call, name in here if not recording.is_cut_point(call)),
        )
        #: The CutPoints that are called here.
        self.cut_points = tuple(name for call, name in here if recording.is_cut_point(call))
        self._shapes = install(root, cutting, stage, self._run)
        for module in root.modules():
            if any("_rota_names" in vars(inner) for inner in module.modules()):
                show_whole(module, self._run)
        self._absents_on: torch.device | None = None
        not_running = {*recording.calls[: part.begin], *recording.cut_points}
        running = dict.fromkeys(recording.calls[part.begin : part.end])
        self._compilable = tuple(recording.units[unit] for unit in running if unit not in not_running)
        for path in self._compilable:
            compile_alike(model.get_submodule(path), root.get_submodule(path))
        # Shared with the copy, so that what is registered in one is in the other.
        self._parameters, self._buffers, self._modules = root._parameters, root._buffers, root._modules
        self._non_persistent_buffers_set = root._non_persistent_buffers_set
        self.training = root.training
        vars(self)["_root"] = root  # not registered, as that would prefix its names

    def forward(self, *values: Any) -> Any:
        """What each target is sent, by name; on the last stage, what the model returns.

        Args:
            values: What each source sent, then the inputs, see `Stages`.
        """
        if self.training and not self._can_train:
            raise PipelineError(
                f"this {self._name} was split in evaluation mode, which does not show what it does in training: call "
                "model.train() before rota.split"
            )
        run, stage_inputs = self._run, self._stage_inputs
        arrived = {
            returned: value[key]
            for arriving, value in zip(self._arriving, values, strict=False)
            for key, returned in arriving
        }
        named = zip(stage_inputs.inputs, values[len(stage_inputs.sources) :], strict=True)
        inputs = {name: value for name, value in named if value is not LeftOut}
        tensors = (value for value in (*arrived.values(), *inputs.values()) if isinstance(value, Tensor))
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        for name, dtype in stage_inputs.sized.items():
            if (shape := values[0][SIZES][name]) is not None:
                inputs[name] = absent(tuple(shape), dtype, device)
        if self._absents_on != device:  # as where the model was split on meta, and this stage's weights alone loaded
            self._change_absents(lambda tensor: tensor.to(device))
            self._absents_on = device
        run.begin({returned: value for returned, value in arrived.items() if returned in self._needed}, device)
        output, has_stopped = None, False
        # Stages draw idle numbers different numbers of times, and scripts draw their batches with the same generators.
        with random_state_kept(nn.Identity(), seeded=True) if self._draws_idly else nullcontext():
            try:
                output = self.root(**inputs)
            except Stopped:
                has_stopped = True
            finally:
                sent = run.end()
        if not self._is_last and not has_stopped:
            raise run.deviation("the forward ended early")
        return self._checked(output) if self._is_last else self._sent(arrived | sent, inputs)

    def _sent(self, sent: dict[Returned, Any], inputs: dict[str, Any]) -> dict[int, dict[str, Any]]:
        sizes = {name: value.shape if isinstance(value := inputs.get(name), Tensor) else None for name in self._sizes}
        return {
            target: {key: sent[returned] for key, returned in leaving} | ({SIZES: sizes} if sizes else {})
            for target, leaving in self._leaving.items()
        }

    def _checked(self, output: Any) -> Any:
        structure, leaves = flatten(output)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Absent):
                path = [*paths(structure)][number]
                raise PipelineError(
                    f"{self._name} returns a value of another stage{f' as {path!r}' if path else ''}, which its "
                    "example did not return: split with an example that returns it"
                )
        if not self._kept_back:
            return output
        for number in self._kept_back:
            leaves[number] = None
        return rebuild(structure, iter(leaves))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the modules that run only here, one by one, with these arguments of `torch.compile`.

        Code between them stays as it is, since it also runs on tensors of other stages, which have no data.
        """
        for path in self._compilable:
            self.root.get_submodule(path).compile(*args, **kwargs)

    def train(self, mode: bool = True) -> CarvedStage:
        """Set the mode of the stage, including the inner copy of the model."""
        super().train(mode)
        self.root.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CarvedStage:
        super()._apply(fn, recurse)
        self._change_absents(fn)
        return self

    def _change_absents(self, change: Callable[[Tensor], Tensor]) -> None:
        absents = self._absents()
        changed = {id(value): value.changed(change) for _, _, value in absents}  # a tied weight stays one object
        self._set_absents((owner, name, changed[id(value)]) for owner, name, value in absents)

    def _absents(self) -> list[tuple[dict[str, Any], str, Absent]]:
        """The weights of other stages, each with the attributes that it is in, and its name there."""
        attributes = [vars(module) for module in self.root.modules()]
        return [(owner, name, value) for owner in attributes for name, value in owner.items() if type(value) is Absent]

    def _set_absents(self, absents: Iterable[tuple[dict[str, Any], str, Absent]]) -> None:
        for owner, name, value in absents:
            owner[name] = value
        self._absents_on = None
        for shapes in self._shapes:
            shapes.clear()

    @contextmanager
    def absents_as(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Inside, tensors of other stages have the dtype that `change` gives them, as this stage's own may have."""
        before = self._absents()
        try:
            self._change_absents(change)
            yield
        finally:
            self._set_absents(before)

    @property
    def root(self) -> nn.Module:
        """The stage's copy of the model, whose forward it runs; it holds the stage's own weights."""
        root: nn.Module = vars(self)["_root"]
        return root

    @property
    def _name(self) -> str:
        return type(self.root).__name__


def _outside(model: nn.Module, owned: frozenset[str], units: set[str]) -> Iterator[str]:
    """Those of the owned parameters that are in none of the units."""
    for name in (name for name, _ in model.named_parameters() if name in owned):
        steps = name.split(".")
        if units.isdisjoint(".".join(steps[:length]) for length in range(len(steps))):
            yield name


def _copy_owning(model: nn.Module, owned: frozenset[str]) -> nn.Module:
    """A copy with the model's own parameters and buffers of these names; the others are Absent, as plain attributes."""
    absents: dict[int, Any] = {
        id(tensor): absent_like(tensor)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if name not in owned
    }
    copied = copy_sharing(model, absents)
    for module in copied.modules():
        if any(isinstance(tensor, Absent) for tensor in (*module._parameters.values(), *module._buffers.values())):
            note_names(module)
        held: dict[str, Any]
        for held in (module._parameters, module._buffers):
            for name, tensor in [*held.items()]:
                if isinstance(tensor, Absent):
                    del held[name]
                    vars(module)[name] = tensor
    return copied
