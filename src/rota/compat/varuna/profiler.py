"""Profiler: costs of each piece between CutPoints at each micro-batch size, and the speed of the links."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar, final

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from rota.compat.varuna.cutting import dry_run
from rota.compat.varuna.inputs import GetBatch, autocast, num_rows, sample_of
from rota.core import reading
from rota.core.cluster import Link
from rota.core.costs import Costs
from rota.core.errors import FormatError, PipelineError, PlacementError
from rota.core.reading import Positive, Whole
from rota.core.writing import write_text
from rota.models import split
from rota.profiling import StageProfileOptions, measure_links, profile
from rota.runtime.process_group import on_first

_REPEATS = 5


class Profile(NamedTuple):
    """`costs[size]`: of all pieces at that micro-batch size; `link` within a node, `long_link` between nodes.

    `reduced_bytes`: of each piece's gradients, which replicas average.
    """

    costs: dict[int, Costs]
    reduced_bytes: tuple[int, ...]
    link: Link
    long_link: Link

    def save(self, folder: Path) -> None:
        """`compute-profile-SIZE.json` for each size, and `comm-profile.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        for size, costs in self.costs.items():
            write_text(folder / f"compute-profile-{size}.json", costs.to_json())
        links = {"link": self.link, "long_link": self.long_link}
        fields = {name: [link.latency_us, link.bytes_per_us] for name, link in links.items()}
        text = reading.dump("communication", {**fields, "reduced_bytes": list(self.reduced_bytes)}, _links)
        write_text(folder / "comm-profile.json", text)

    @classmethod
    def load(cls, folder: Path) -> Profile:
        """Raises FormatError."""
        paths = {path.stem.removeprefix("compute-profile-"): path for path in folder.glob("compute-profile-*.json")}
        sizes = [size for size in paths if re.fullmatch(r"[1-9][0-9]{0,8}", size)]
        costs = {int(size): _read(paths[size], Costs.from_json) for size in sizes}
        if not costs:
            raise FormatError(f"no profile in {folder}; make one by Profiler(…, out_folder=…).profile_all(sizes)")
        if not (path := folder / "comm-profile.json").exists():
            raise FormatError(f"the profile in {folder} is incomplete: {path.name} is missing; profile again")
        links = _read(path, _links)
        return cls(dict(sorted(costs.items())), *links)


_Read = TypeVar("_Read")


def _read(path: Path, parse: Callable[[str], _Read]) -> _Read:
    text = reading.read_text(path)
    try:
        return parse(text)
    except (FormatError, PlacementError) as error:
        raise FormatError(f"{path}: {error}; profile again") from None


class _Links(msgspec.Struct):
    """The measured links in JSON: latency_us and bytes_per_us."""

    link: tuple[Whole, Positive | None]
    long_link: tuple[Whole, Positive | None]
    reduced_bytes: tuple[Whole, ...]


def _links(text: str) -> tuple[tuple[int, ...], Link, Link]:
    file = reading.parse(text, "communication").read(_Links)
    return file.reduced_bytes, Link(*file.link), Link(*file.long_link)


@final
class Profiler:
    """Measures a model's pieces and the links. Every process makes one, or a single process, which has no links.

    The first process measures, on the CPU.

    Args:
        model: A model with CutPoints.
        get_batch: Returns inputs as a dictionary, given the number of examples.
        device, from_cache: Ignored.
        gpus_per_node: Processes on one node; None: all.
        fp16: Whether forwards compute in float16.
        out_folder: The folder for the profile.
        add_to_existing: Whether to keep the folder's profiles of other sizes.
    """

    def __init__(
        self,
        model: nn.Module,
        get_batch: GetBatch,
        device: int = -1,  # noqa: ARG002
        gpus_per_node: int | None = None,
        fp16: bool = False,
        out_folder: str | Path = "profiles",
        *,
        from_cache: bool = True,  # noqa: ARG002
        add_to_existing: bool = False,
    ) -> None:
        self._model, self._get_batch, self._per_node = model, get_batch, gpus_per_node
        self._fp16, self._folder, self._adds = fp16, Path(out_folder), add_to_existing
        self._state_share = 0.0

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the optimizer's state as memory; its size is measured by a step of a copy."""
        trial = copy.deepcopy(optimizer)
        parameters = [parameter for group in trial.param_groups for parameter in group["params"]]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        trial.step()
        state = [value for values in trial.state.values() for value in values.values() if torch.is_tensor(value)]
        self._state_share = _num_bytes(state) / _num_bytes(parameters)

    def profile_all(self, microbatch_sizes: Iterable[int]) -> dict[int, Costs]:
        """Costs of all pieces for each size, measured and kept. Collective. Raises PipelineError."""
        measured = on_first("profiling", lambda: [*map(self._measured, microbatch_sizes)])
        link = long_link = Link()
        if dist.is_initialized() and (num_processes := dist.get_world_size()) > 1:
            cluster = measure_links().cluster
            link = long_link = cluster.link_between(0, 1)
            if self._per_node is not None and self._per_node < num_processes:
                long_link = cluster.link_between(0, self._per_node)
        costs = {size: Costs.from_json(text) for size, text, _ in measured}
        profile = Profile(costs, tuple(measured[-1][2]) if measured else (), link, long_link)
        on_first(f"writing to {self._folder}", lambda: self._keep(profile))
        return profile.costs

    def _keep(self, profile: Profile) -> None:
        for path in () if self._adds else self._folder.glob("compute-profile-*.json"):
            path.unlink()
        profile.save(self._folder)

    def _measured(self, size: int) -> tuple[int, str, tuple[int, ...]]:
        """The size, its costs, and the bytes of each piece's gradients."""
        inputs = sample_of(self._get_batch, size)
        if (rows := num_rows(inputs)) != size:
            raise PipelineError(f"get_batch({size}) returned {rows} examples; return {size}")
        with autocast(self._fp16):
            num_pieces = dry_run(self._model, inputs, rows) + 1
            stages = split(self._model, num_pieces, example=inputs, direct_skips=True)
            costs = profile(stages, inputs, options=StageProfileOptions(repeats=_REPEATS, here=True)).as_chain()
        reduced = tuple(_num_bytes([p for p in piece.parameters() if p.requires_grad]) for piece in stages.modules)
        static = zip(costs.static_bytes, reduced, strict=True)
        with_state = tuple(num_bytes + round(self._state_share * part) for num_bytes, part in static)
        costs = replace(costs, static_bytes=with_state)
        return size, costs.to_json(), reduced


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
