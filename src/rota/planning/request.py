"""What autoplan is asked for: costs or how to measure them, a machine, a batch, what it may choose, and how long."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

from rota.core.errors import PlacementError
from rota.core.layers import ESTIMATED, LayerCosts
from rota.core.reading import whole
from rota.core.stopping import guarded
from rota.core.text import count_text, time_text
from rota.planning.machine import Machine

_MOST_ROWS = 10_000_000  # of a step
_BLOCK = re.compile(r"(.*?\.\d+)\.")  # with a module inside it: an entry of a list of modules, as in layers.0.mlp
_EVERY_S = 0.2  # between reports where nothing better was found
_MOST_TOLERANCE = 0.05  # a profile whose figures are further apart is no reason to recommend much slower plans


@dataclass(frozen=True, slots=True)
class Choices:
    """What `autoplan` may choose.

    Attributes:
        inference: Whether to plan forward passes only.
        recompute: Whether stages may recompute. PyTorch's schedule CSV, and so torchtitan, cannot express it.
        pipeline_ranks: Ranks of every pipeline; None: any number.
        copies: Whether a stage may be on two ranks, as in bidirectional pipelines, so that all weights are held twice.
            Never on a machine where the cost of summing gradients is unknown.
        split_backward: Whether backwards may be split into I and W. Trainers other than Rota cannot split those of
            models under `torch.compile` or with activation checkpointing.
    """

    inference: bool = False
    recompute: bool = True
    pipeline_ranks: int | None = None
    copies: bool = False
    split_backward: bool = True


#: All of them.
ANYTHING = Choices()


@dataclass(frozen=True, slots=True)
class Measuring:
    """How layers are measured.

    Attributes:
        device: "cpu" (None) or an accelerator of this machine, such as "cuda"; for every other device, costs are
            estimated.
        repeats: Measurements, of which the median counts.
        cache: A file or folder that keeps them; None: they are not kept.
        refresh: Whether to measure again what the cache has.
        cuts: Patterns of modules that can start a stage; None: all possible cuts.
    """

    device: str | None = None
    repeats: int = 7
    cache: str | Path | None = None
    refresh: bool = False
    cuts: Sequence[str] | None = None


#: On the CPU of this machine.
MEASURED_HERE = Measuring()


@dataclass(frozen=True)
class Request:
    """The arguments of `autoplan`: `profiles` by rows per micro-batch, `batch_rows` of a step over all replicas.

    Raises PlacementError where no step can be made of these micro-batches, or no pipeline of these ranks.
    """

    profiles: Mapping[int, LayerCosts]
    machine: Machine
    batch_rows: int
    choices: Choices = ANYTHING

    def __post_init__(self) -> None:
        if not isinstance(self.profiles, Mapping) or not self.profiles:
            raise PlacementError("give profiles as a dict of layers by rows, for one number of rows or more")
        for rows, layers in self.profiles.items():
            if layers.rows != rows:
                raise PlacementError(
                    f"profiles[{rows}] was measured with {count_text(layers.rows, 'row')} per micro-batch; give it as "
                    f"profiles[{layers.rows}]"
                )
        batch_rows = self.batch_rows
        fits = isinstance(batch_rows, int) and not all(batch_rows % rows for rows in self.profiles)
        if not fits or not 1 <= batch_rows <= _MOST_ROWS:
            raise PlacementError(
                f"batch_rows is {batch_rows!r}: give a multiple of one of the rows that were measured, "
                f"{', '.join(map(str, sorted(self.profiles)))}, of at most {_MOST_ROWS:,}"
            )
        num_layers = max(layers.num_layers for layers in self.profiles.values())
        num_ranks, most = self.choices.pipeline_ranks, min(self.machine.num_ranks, num_layers)
        if num_ranks is not None and not 1 <= whole("pipeline_ranks", num_ranks) <= most:
            raise PlacementError(
                f"a pipeline of {num_ranks} ranks: give 1 to {most}, as there are {self.machine.num_ranks} ranks and "
                f"the model can be cut into {num_layers} layers; to cut it in more places, name modules, such as "
                f"--cuts 'layers.*'"
            )
        if self.choices.inference:
            alone = {rows: _forward_alone(layers) for rows, layers in self.profiles.items()}
            object.__setattr__(self, "profiles", alone)
        object.__setattr__(self, "profiles", dict(sorted(self.profiles.items())))

    @property
    def may_recompute(self) -> bool:
        """Whether stages may recompute: only to save memory that is limited, as it never makes a step shorter."""
        is_limited = any(limit is not None for limit in self.machine.limits)
        return self.choices.recompute and not self.choices.inference and is_limited

    @property
    def may_replicate(self) -> bool:
        """Whether there may be several replicas: only where the cost of summing their gradients is known."""
        nothing = self.choices.inference or not any(any(layers.gradient_bytes) for layers in self.profiles.values())
        return nothing or self.machine.prices_sums

    @cached_property
    def tolerance(self) -> float:
        """The part of a step by which predicted steps may differ and count as equal: how far the profile is apart."""
        return min(max(layers.mean_spread for layers in self.profiles.values()), _MOST_TOLERANCE)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the plan may be worse than it could be, and what to do: a line each."""
        doubts = []
        if self.machine.num_ranks > 1 and all(layers.num_layers == 1 for layers in self.profiles.values()):
            doubts.append(
                "the model has no place where it can be cut, so there is no pipeline, only replicas; name modules that "
                "can start a stage, such as --cuts 'layers.*', or call a separate rota.CutPoint() between every two "
                "blocks in the model's forward: x = self.cuts[i](x)"
            )
        doubtful = {rows: layers.why_doubtful for rows, layers in self.profiles.items() if layers.why_doubtful}
        incomplete = next((layers.why_incomplete for layers in self.profiles.values() if layers.uncounted), "")
        if incomplete:
            doubts.append(incomplete)
        elif doubtful:
            rows, why = next(iter(doubtful.items()))
            more = f"; the same goes for {count_text(len(doubtful) - 1, 'other size')}" if len(doubtful) > 1 else ""
            doubts.append(
                f"layers were measured on a busy or uneven machine: with {count_text(rows, 'row')} per micro-batch, "
                f"{why}{more}. Another run may cut the model elsewhere: stop other programs, and profile again "
                f"(--refresh)"
            )
        return tuple(doubts)

    @property
    def estimated_for(self) -> str:
        """The note of costs that nothing measured, such as "estimated for h100"; "" if they are not estimates."""
        notes = (layers.note for layers in self.profiles.values())
        return next((note for note in notes if note.startswith(ESTIMATED)), "")


def _forward_alone(layers: LayerCosts) -> LayerCosts:
    """The layers for inference: their forwards, parameters and buffers alone."""
    zeros = (0,) * layers.num_layers
    backward = ("backward_us", "input_us", "weight_us", "recompute_us", "optimizer_us")
    memory = ("kept_bytes", "waiting_bytes", "backward_peak_bytes", "input_peak_bytes", "weight_peak_bytes")
    columns: dict[str, Any] = dict.fromkeys((*backward, *memory, "gradient_bytes", "optimizer_bytes"), zeros)
    columns |= dict.fromkeys(("boundary_gradient_bytes", "received_bytes"), (0,) * len(layers.edges))
    # Shared storages may be among what is left out; tied parameters count with each layer.
    columns |= dict.fromkeys(("shared", "waiting_shared", "tied"), ())
    return replace(layers, **columns)


def refuse_cuts_in_blocks(profiles: Mapping[int, LayerCosts]) -> None:
    """Raise PlacementError if the layers on both sides of a cut hold parts of one block, or a cut's name is inside one.

    Other trainers cannot make such a cut. CutPoints are not among the layers' contents, so one at the end or the
    beginning of a block is accepted.
    """
    for layers in profiles.values():
        contents = [text.split(", ") for text in layers.contents]
        for cut, before, after in zip(layers.cuts, contents, contents[1:], strict=False):
            before_cut, after_cut = (
                {match[1] for match in map(_BLOCK.match, names) if match} for names in (before, after)
            )
            named = _BLOCK.match(cut)
            if named and any(name == cut or name.startswith(f"{cut}-") for name in after):
                block, remedy = named[1], f"cut between blocks with --cuts '{re.sub(r'[0-9]+$', '*', named[1])}'"
            elif before_cut & after_cut:
                block, remedy = min(before_cut & after_cut), "call the CutPoint between blocks"
            else:
                continue
            raise PlacementError(
                f"--exportable: other trainers cannot begin a stage at {cut}, because it is inside {block}, which they "
                f"keep or remove as a whole; {remedy}, or plan for Rota, without --exportable"
            )


class Progress(NamedTuple):
    """How far a search is: what it does, plans simulated so far, and the best step time (None: nothing fits yet)."""

    doing: str
    num_plans: int
    best_us: int | None
    elapsed_s: float

    def __str__(self) -> str:
        best = "nothing fits yet" if self.best_us is None else f"best {time_text(self.best_us)}"
        return f"{self.elapsed_s:5.1f} s  {count_text(self.num_plans, 'plan')}  {best}  {self.doing}"


@final
class Deadline:
    """Ends after `seconds`, or when it is stopped, by Ctrl-C or by an error of `progress`.

    The seconds count from `began_s` of `time.monotonic`; None: from now on.
    """

    def __init__(
        self, seconds: float, progress: Callable[[Progress], None] | None, began_s: float | None = None
    ) -> None:
        self.seconds = seconds
        self.stopped_by = ""
        self.progress_error: Exception | None = None
        #: Whether something was left out for lack of time.
        self.ran_out = False
        self._progress = guarded(progress, self)
        self._began = time.monotonic() if began_s is None else began_s
        self._reported_s = float("-inf")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        """Seconds left; 0.0 once the search was stopped."""
        return 0.0 if self.stopped_by else max(self.seconds - self.elapsed_s, 0.0)

    def has(self, seconds: float) -> bool:
        """Whether more than `seconds` are left; if not, `ran_out` is set."""
        enough = self.left_s > seconds
        self.ran_out |= not enough
        return enough

    def report(self, doing: str, num_plans: int, best_us: int | None, at_once: bool = False) -> None:
        """Call `progress` with the best makespan so far (µs), at most every `_EVERY_S` seconds unless `at_once`."""
        if at_once or self.elapsed_s - self._reported_s > _EVERY_S:
            self._reported_s = self.elapsed_s
            self._progress(Progress(doing, num_plans, best_us, self.elapsed_s))
