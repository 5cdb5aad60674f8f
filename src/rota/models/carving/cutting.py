"""What each stage of a recorded forward runs, receives, sends and owns, and why a cut is refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rota.core.errors import SplitError
from rota.models.carving.draws import IN_A_MODULE, remedy
from rota.models.carving.recording import Drawn, FromInput, FromModel, Label, Recording, Returned, Within

CUT_ELSEWHERE = "cut elsewhere, so that both are on one stage"


@dataclass(frozen=True, slots=True)
class StagePart:
    """The part of a recorded forward that one stage does."""

    begin: int  # its first call of a unit
    end: int  # the first call of the next stage
    needed: tuple[Returned, ...]  # values of earlier stages that it reads
    sent: dict[int, tuple[Returned, ...]]  # by target
    owned: frozenset[str]  # names of parameters and buffers
    inputs: frozenset[str]  # names of inputs whose values it reads


@dataclass(frozen=True, slots=True)
class Cutting:
    """A recorded forward, cut into stages."""

    recording: Recording
    parts: tuple[StagePart, ...]


def cut_recording(
    recording: Recording, starts: Sequence[int], names: Collection[str], *, relay: bool = True
) -> Cutting:
    """Cut into stages that begin at these calls, in order. `names`: those of all parameters and buffers of the model.

    `relay`: values from non-adjacent stages are passed on by those in between, so that the stages are a chain;
    otherwise they are sent directly.
    """
    ranges = [range(*ends) for ends in pairwise([0, *starts, len(recording.calls)])]
    reads = [_reads(recording, calls, is_last=calls is ranges[-1]) for calls in ranges]
    _add_writes(recording, reads, ranges)
    reads = [_with_whole_inner(recording, labels) for labels in reads]
    _refuse(recording, reads, ranges)
    _refuse_shared_memory(recording, reads, starts)
    needed = [
        tuple(value for value in recording.in_set(labels) if isinstance(value, Returned) and value.call not in calls)
        for labels, calls in zip(reads, ranges, strict=True)
    ]
    owned = [{label.name for label in recording.in_set(labels) if isinstance(label, FromModel)} for labels in reads]
    for name in set(names).difference(*owned):
        owned[_home(recording, name, ranges)].add(name)
    parts = []
    for stage, calls in enumerate(ranges):
        later = range(stage + 1, len(ranges))
        sent = {target: tuple(value for value in needed[target] if value.call in calls) for target in later}
        if relay and later:
            passing = {value for target in later for value in needed[target] if value.call < calls.stop}
            sent = {stage + 1: tuple(sorted(passing))}
        parts.append(
            StagePart(
                calls.start,
                calls.stop,
                needed[stage],
                {target: values for target, values in sent.items() if values},
                frozenset(owned[stage]),
                frozenset(label.name for label in recording.in_set(reads[stage]) if isinstance(label, FromInput)),
            )
        )
    for stage, part in enumerate(parts[:-1]):
        if not any(value.call in ranges[stage] for values in part.sent.values() for value in values):
            raise SplitError(
                f"nothing that stage {stage} makes, before {recording.cut_name(part.end)}, is used after it: cut "
                "elsewhere"
            )
    return Cutting(recording, tuple(parts))


def _reads(recording: Recording, calls: range, is_last: bool) -> int:
    """What a stage reads: in its units, in the model's result if it is the last, and in code between units.

    The latter are values inspected by code between units, which every stage runs up to its own end.
    """
    labels = recording.result if is_last else 0
    for call in calls:
        labels |= recording.reads[call]
    for inspection in recording.inspections:
        if is_last or inspection.before <= calls.stop:
            labels |= inspection.seen
    return labels


def _add_writes(recording: Recording, reads: list[int], ranges: list[range]) -> None:
    """If a stage has a tensor that code between units writes into, it also needs what is written, if not drawn."""
    drawn = sum(1 << bit for bit, label in enumerate(recording.labels) if isinstance(label, Drawn))
    for stage, calls in enumerate(ranges):
        changed = True
        while changed:
            changed = False
            for write in recording.writes:
                source = write.source & ~drawn
                if write.before > calls.stop or not source & ~reads[stage]:
                    continue
                if all(_has(label, reads[stage], recording, calls) for label in recording.in_set(write.target)):
                    reads[stage] |= source
                    changed = True


def _has(label: Label, reads: int, recording: Recording, calls: range) -> bool:
    if isinstance(label, (Returned, Within)) and label.call in calls:
        return True
    return isinstance(label, Drawn) or label in recording.in_set(reads)


def _with_whole_inner(recording: Recording, labels: int) -> int:
    """Add all that a module with hooks returned if any of it is read, since hooks get the whole output."""
    bits = {
        label: 1 << bit for bit, label in enumerate(recording.labels) if isinstance(label, Returned) and label.inner
    }
    wanted = {label for label in recording.in_set(labels) if label in bits}
    changed = bool(wanted)
    while changed:
        changed = False
        for (call, inner, nth), output in recording.inner_outputs.items():
            values = {leaf.inner for leaf in output.leaves if leaf.inner is not None}
            if not values & wanted:
                continue
            if any(leaf.is_tensor and leaf.inner is None and leaf.argument is None for leaf in output.leaves):
                raise SplitError(
                    f"a hook takes what {inner} of {recording.call_name(call)} returns in its call {nth + 1}, which "
                    "includes a tensor that neither this module nor an argument of the block has made: "
                    f"{CUT_ELSEWHERE}, or let it return only new tensors"
                )
            changed = changed or not values <= wanted
            wanted |= values
    for value in wanted:
        labels |= bits[value]
    return labels


def _refuse(recording: Recording, reads: list[int], ranges: list[range]) -> None:
    if recording.adds_losses and len(ranges) > 1:
        raise SplitError(
            "rota.add_loss is called between modules, in code that several stages run, each of which would add the "
            "loss: call it in the forward of a module that has weights and no cut inside"
        )
    for stage, (labels, calls) in enumerate(zip(reads, ranges, strict=True)):
        for label in recording.in_set(labels):
            if isinstance(label, Within) and label.call not in calls:
                raise SplitError(
                    f"stage {stage} reads what {recording.call_name(label.call)} makes, which neither it nor a module "
                    f"in it returns: {CUT_ELSEWHERE}, or return it from that module's forward"
                )
            if isinstance(label, Returned) and label.call not in calls and label.call in recording.functions:
                function = recording.functions[label.call]
                how = "checkpoint with use_reentrant=False, or " if function == "CheckpointFunction" else ""
                raise SplitError(
                    f"stage {stage} reads what {recording.call_name(label.call)} returns inside the autograd function "
                    f"{function}, which would have no gradient for it: {how}cut before the modules that this function "
                    "calls, or after the next module that reads its result"
                )
            if isinstance(label, Drawn) and sum(label in [*recording.in_set(other)] for other in reads) > 1:
                raise SplitError(
                    f"stages read random numbers that the forward draws between modules, {label.by}, and each stage "
                    f"would draw its own: {remedy(label.rates, IN_A_MODULE)}, or {CUT_ELSEWHERE}"
                )
            if isinstance(label, FromModel) and any(write.into == label.name for write in recording.writes):
                raise SplitError(
                    f"the forward writes into {label.name} between modules, which every stage would repeat: do it "
                    "in the forward of a module that is on one stage"
                )


def _refuse_shared_memory(recording: Recording, reads: list[int], starts: Sequence[int]) -> None:
    """Refuse to change in place what crosses a CutPoint, if a stage after it also reads what the CutPoint was given.

    Both are one tensor in the model, but two in that stage.
    """
    for stage, start in enumerate(starts, 1):
        cut_point = start - 1
        if cut_point not in recording.changed_after:
            continue
        kept = sum(1 << bit for bit, label in enumerate(recording.labels) if not isinstance(label, FromModel))
        if any(labels & recording.reads[cut_point] & kept for labels in reads[stage:]):
            raise SplitError(
                f"what CutPoint {recording.call_name(cut_point)} is given is read after it too, by another name, and "
                "one of the two is changed in place: make a new value instead (x = x + 1 for x += 1), or read only "
                "what the CutPoint returns"
            )


def _home(recording: Recording, name: str, ranges: list[range]) -> int:
    """The stage that owns a parameter nothing reads: that of its unit's first call, else the last stage."""
    for call, unit in enumerate(recording.calls):
        if name.startswith(recording.units[unit] + "."):
            return next(stage for stage, calls in enumerate(ranges) if call in calls)
    return len(ranges) - 1
