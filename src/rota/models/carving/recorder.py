"""Recording: one forward of a model, in which every tensor is labelled with what it was made from.

Code between units passes the labels of what it reads on to what it makes; a unit's own operations note what it reads.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from operator import or_
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from rota.models.added_losses import AddedLosses, collect_losses
from rota.models.carving.copies import copy_sharing, refuse_original
from rota.models.carving.draws import is_certain, rates_read, refuse_decision, watch_python_draws
from rota.models.carving.operations import (
    OnMeta,
    is_random,
    is_shape_only,
    leaves_of,
    needs_numbers,
    storage_of,
)
from rota.models.carving.recording import (
    Drawn,
    FromInput,
    FromModel,
    Inspection,
    Label,
    LabelSet,
    Leaf,
    Output,
    Recording,
    Returned,
    Within,
    Write,
)
from rota.models.carving.units import DROPOUTS, PLAIN, find_units, flatten, intercept, rebuild, units_at
from rota.models.cutpoint import CutPoint
from rota.models.randomness import random_state_kept
from rota.models.source_places import autograd_function_now, place_now
from rota.torch_internals import TorchDispatchMode, name_of, run_uncompiled, written_arguments


def record(model: nn.Module, blocks: Sequence[str], inputs: Mapping[str, Any]) -> Recording:
    """Run `model` once on `inputs`, leaving it, its buffers and all random states as they were.

    `blocks`: the paths of modules that are units regardless of content. A model on the meta device is recorded by
    shapes alone; if inputs are on a real device, values computed from them alone keep their data.
    """
    opened: set[str] = set()
    recording = _record(model, blocks, opened, inputs)
    while not recording.bypassed <= opened:
        opened |= recording.bypassed
        recording = _record(model, blocks, opened, inputs)
    used = reduce(or_, (*recording.reads, *(inspection.seen for inspection in recording.inspections)), recording.result)
    drawing = {label.module for label in recording.in_set(used) if isinstance(label, Drawn) and label.module}
    return _record(model, [*blocks, *sorted(drawing)], opened, inputs) if drawing else recording


def _record(model: nn.Module, blocks: Sequence[str], opened: Set[str], inputs: Mapping[str, Any]) -> Recording:
    units = find_units(model, blocks, opened)
    cut_points = (number for number, unit in enumerate(units_at(model, units)) if isinstance(unit, CutPoint))
    recording = Recording(units, frozenset(cut_points), training=model.training)
    buffers = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    copied = copy_sharing(model, buffers)
    recorder = _Recorder(recording, copied)
    for name, tensor in [*copied.named_parameters(), *copied.named_buffers()]:
        recorder.label(tensor, FromModel(name))
        recorder.weights[storage_of(tensor)] = name
    for number, unit in enumerate(units_at(copied, units)):
        intercept(unit, partial(recorder.run_unit, number, type(unit)))
        recorder.add_inner(unit, units[number])
    with ExitStack() as stack:
        stack.enter_context(random_state_kept(model))
        stack.enter_context(run_uncompiled())
        recorder.added = stack.enter_context(collect_losses())
        stack.enter_context(recorder.modules_watched({*model.modules()} - {*copied.modules()}))
        if any(parameter.is_meta for parameter in model.parameters()):
            stack.enter_context(OnMeta())
        stack.enter_context(recorder)
        stack.enter_context(_ValuesRead(recorder))
        for name, value in inputs.items():
            recorder.label_input(name, value)
        with watch_python_draws(copied, lambda: copied(**inputs)) as has_drawn:
            result = copied(**inputs)
            recording.draws_idly = has_drawn()
    recorder.finish(result)
    recorder.release()
    return recording


@final
class _Recorder(TorchDispatchMode):
    """Labels what every operation makes."""

    def __init__(self, recording: Recording, model: nn.Module) -> None:
        super().__init__()
        self.recording, self._model = recording, model
        self.call: int | None = None  # of the unit that runs
        self.added = AddedLosses()
        self._num_added = 0  # by units
        self._sets: dict[int, LabelSet] = {}  # by the id of a tensor
        self._written: dict[int, LabelSet] = {}  # by storage: what was written into it
        self._memory: dict[int, LabelSet] = {}  # by storage: of a tensor whose object PyTorch has replaced
        self._alive: list[Any] = []  # keeps tensors alive, so that no other tensor gets the id of one
        self._bits: dict[Label, int] = {}
        self._num_drawn = 0
        self.weights: dict[int, str] = {}  # names of parameters and buffers, by storage
        self._passed: dict[int, set[int]] = {}  # by storage: the calls of CutPoints that have returned it
        self._paths = {module: path for path, module in model.named_modules()}
        self._running: list[nn.Module] = []  # between units: the modules whose forwards run
        self._decisions: list[tuple[int, str, LabelSet]] = []  # before which call, where, and by what
        self._arguments: list[Any] = []  # of the unit that runs
        self._inner: dict[nn.Module, str] = {}
        self._unit_of: dict[nn.Module, str] = {}
        self._nth: dict[str, int] = {}
        self._draws: set[int] = set()  # ids of tensors of random numbers between 0 and 1

    def bit(self, label: Label) -> LabelSet:
        """The set of this label alone."""
        if label not in self._bits:
            self._bits[label] = 1 << len(self.recording.labels)
            self.recording.labels.append(label)
        return self._bits[label]

    def label(self, tensor: Tensor, label: Label) -> None:
        """Label `tensor` with `label` alone."""
        self._set(tensor, self.bit(label))
        if (storage := storage_of(tensor)) in self._written:
            self._written[storage] = self.bit(label)

    def label_input(self, name: str, value: Any) -> None:
        """Label all tensors of an input."""
        for leaf in flatten(value)[1]:
            if isinstance(leaf, Tensor):  # which may be a parameter, or given under two names
                self._set(leaf, self._sets.get(id(leaf), 0) | self.bit(FromInput(name)))

    def labels_of(self, tensor: Tensor) -> LabelSet:
        """The labels of what a tensor was made from."""
        storage = storage_of(tensor)
        labels = self._sets.get(id(tensor))
        return (self._memory.get(storage, 0) if labels is None else labels) | self._written.get(storage, 0)

    def _set(self, tensor: Tensor, labels: LabelSet) -> None:
        self._sets[id(tensor)] = labels
        storage = storage_of(tensor)
        self._memory[storage] = self._memory.get(storage, 0) | labels
        self._alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and label what it makes."""
        del types
        kwargs = kwargs or {}
        arguments = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        labels = 0 if is_shape_only(func) else reduce(or_, map(self.labels_of, arguments), 0)
        made = func(*args, **kwargs)
        if self.call is None:
            labels = self._between_units(func, args, labels, made)
        else:
            self.recording.reads[self.call] |= labels
            labels = self.bit(Within(self.call))
        for written in written_arguments(func, args, kwargs):
            self._write(written, labels)
        for tensor in leaves_of(made):
            if isinstance(tensor, Tensor) and not any(tensor is argument for argument in arguments):
                self._set(tensor, labels)
        return made

    def _between_units(self, func: Any, args: tuple[Any, ...], labels: LabelSet, made: Any) -> LabelSet:
        before = len(self.recording.calls)
        if is_random(func):
            self._num_drawn += 1
            if isinstance(made, Tensor) and name_of(func) == "rand":
                self._draws.add(id(made))
            rates = rates_read(self._model, traceback.walk_stack(sys._getframe()))
            by = f"{name_of(func)} at {place_now()}"
            path = self._paths.get(self._running[-1], "") if self._running else ""
            module = "" if any(unit.startswith(f"{path}.") for unit in self.recording.units) else path
            return labels | self.bit(Drawn(self._num_drawn, by, module, rates))
        if func is torch.ops.aten.detach.default and id(args[0]) in self._draws:
            self._draws.add(id(made))  # torch.rand itself may detach what it has drawn
        if is_certain(func, args, self._draws):
            return 0
        if needs_numbers(func, args) and labels:
            self.recording.inspections.append(Inspection(before, labels))
            if torch.Tag.data_dependent_output in func.tags:
                self._decisions.append((before, place_now(), labels))
        return labels

    def show_values(self, tensor: Tensor) -> None:
        """Python reads all numbers of a tensor, without an operation."""
        labels = self.labels_of(tensor)
        if self.call is not None:
            self.recording.reads[self.call] |= labels
        elif labels:
            before = len(self.recording.calls)
            self.recording.inspections.append(Inspection(before, labels))
            self._decisions.append((before, place_now(), labels))

    def _write(self, written: Tensor, labels: LabelSet) -> None:
        before = self.labels_of(written)
        self.recording.mutated |= before
        self.recording.changed_after |= self._passed.get(storage_of(written), set())
        if self.call is None:
            into = self.weights.get(storage_of(written))
            self.recording.writes.append(Write(len(self.recording.calls), before, labels & ~before, into))
        storage = storage_of(written)
        self._written[storage] = self._written.get(storage, 0) | labels
        self._alive.append(written)

    # --- units ----------------------------------------------------------------------------------------------------

    def add_inner(self, unit: nn.Module, name: str) -> None:
        """Watch the modules inside a unit: hooks may take their outputs out of it, and others call them."""
        for path, module in unit.named_modules():
            if path:
                self._inner.setdefault(module, path)
                self._unit_of.setdefault(module, name)

    @contextmanager
    def modules_watched(self, others: Set[nn.Module]) -> Iterator[None]:
        """Inside, watch what calls of modules begin and end. `others`: those that the recorded forward may not call."""

        def begins(module: nn.Module, _: Any) -> None:
            if self.call is None:
                if module in others:
                    refuse_original(self._model, module)
                if module in self._unit_of:
                    self.recording.bypassed.add(self._unit_of[module])
                self._running.append(module)

        with register_module_forward_pre_hook(begins), register_module_forward_hook(self._ends):
            yield

    def _ends(self, module: nn.Module, _: Any, output: Any) -> None:
        path = self._inner.get(module)
        if self.call is None:
            self._running.pop()
            return
        if path is None or not module._forward_hooks:  # only hooks take an output out of a unit
            return
        nth = self._nth[path] = self._nth.get(path, -1) + 1
        structure, leaves = flatten(output)
        recorded = []
        for number, leaf in enumerate(leaves):
            inner, argument = None, _position(leaf, self._arguments)
            if isinstance(leaf, Tensor) and argument is None:
                made_by = [*self.recording.in_set(self.labels_of(leaf))]
                if len(made_by) == 1 and isinstance(made_by[0], Returned) and made_by[0].inner:
                    inner = made_by[0]
                elif Within(self.call) in made_by:
                    inner = Returned(self.call, number, path, nth)
                    self.label(leaf, inner)
            recorded.append(_leaf_of(leaf, argument, [])._replace(inner=inner))
        self.recording.inner_outputs[self.call, path, nth] = Output(structure, tuple(recorded))

    def run_unit(
        self, unit: int, base: type[nn.Module], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call of a unit, whose class is `base`, and record it."""
        if self.call is not None:
            return base.__call__(module, *args, **kwargs)
        _, self._arguments = flatten((args, kwargs))
        self.call = len(self.recording.calls)
        self.recording.calls.append(unit)
        self.recording.reads.append(0)
        self._nth.clear()
        num_added = len(self.added.losses)
        if (function := autograd_function_now()) is not None:
            self.recording.functions[self.call] = function.__qualname__
        output = base.__call__(module, *args, **kwargs)
        always_new = isinstance(module, (CutPoint, *DROPOUTS))
        if always_new:
            output = _as_new(output)
        self._end_call(output, always_new=always_new)
        self._num_added += len(self.added.losses) - num_added
        return output

    def _end_call(self, output: Any, *, always_new: bool) -> None:
        """`always_new`: a tensor counts as new, even if it is an argument."""
        assert self.call is not None
        arguments = self._arguments
        structure, leaves = flatten(output)
        recorded = []
        for number, leaf in enumerate(leaves):
            same = None if always_new and isinstance(leaf, Tensor) else _position(leaf, arguments)
            overwritten = None
            if isinstance(leaf, Tensor):
                if same is not None and self.labels_of(leaf) & self.bit(Within(self.call)):
                    same, overwritten = None, same
                if same is None:
                    self.label(leaf, Returned(self.call, number))
                if self.recording.is_cut_point(self.call):
                    self._passed.setdefault(storage_of(leaf), set()).add(self.call)
            recorded.append(_leaf_of(leaf, same, arguments)._replace(overwritten=overwritten))
        self.recording.outputs.append(Output(structure, tuple(recorded)))
        self.call, self._arguments = None, []

    def release(self) -> None:
        """Forget the model, whose modules refer to this, and its graph: neither must wait for the garbage collector."""
        del self._model, self.added
        self._alive.clear()
        self._paths.clear()
        self._unit_of.clear()
        self._running.clear()

    def finish(self, result: Any) -> None:
        """Note what the forward returned, and refuse what it decided by random numbers."""
        for before, place, labels in self._decisions:
            drawn = next((label for label in self.recording.in_set(labels) if isinstance(label, Drawn)), None)
            if drawn is not None and before < len(self.recording.calls):
                refuse_decision(place, drawn.by, drawn.rates)
        self.recording.adds_losses = len(self.added.losses) > self._num_added
        for number, leaf in enumerate(flatten(result)[1]):
            if isinstance(leaf, Tensor):
                self.recording.result |= self.labels_of(leaf)
            elif type(leaf) not in PLAIN:
                labels = reduce(or_, map(self.labels_of, _tensors_in_object(leaf)), 0)
                if any(isinstance(label, (Returned, Within)) for label in self.recording.in_set(labels)):
                    self.recording.result_objects.append(number)


@final
class _ValuesRead(TorchFunctionMode):
    """Notes what Python reads of tensors without an operation that a dispatch mode would see."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is read, and run the function."""
        del types
        if func in _SHOWING:
            self._recorder.show_values(args[0])
        return func(*args, **(kwargs or {}))


_SHOWING = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)


def _as_new(value: Any) -> Any:
    """The value with other tensors, of the same numbers."""
    structure, leaves = flatten(value)
    return rebuild(structure, iter([leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]))


def _position(leaf: Any, arguments: list[Any]) -> int | None:
    """Which argument a leaf is, if it is one and no plain value."""
    if not isinstance(leaf, Tensor) and isinstance(leaf, (bool, int, float, str, type(None))):
        return None
    return next((number for number, argument in enumerate(arguments) if argument is leaf), None)


def _leaf_of(leaf: Any, argument: int | None, arguments: list[Any]) -> Leaf:
    if not isinstance(leaf, Tensor):
        return Leaf(argument, False, leaf)
    shape = tuple(leaf.shape)
    alike = (i for i, other in enumerate(arguments) if isinstance(other, Tensor) and tuple(other.shape) == shape)
    return Leaf(argument, True, None, shape, leaf.dtype, next(alike, None))


def _tensors_in_object(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Tensors that an object of any class holds, such as a cache of keys and values."""
    if isinstance(value, Tensor):
        yield value
        return
    if depth:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        for item in (*items, *getattr(value, "__dict__", {}).values()):
            yield from _tensors_in_object(item, depth - 1)
