"""The protocol of docs/elastic.md, exhaustively: 2 stages in 2 replicas, and a kill between any two of their actions.

The model's ranks do what those of a run do, in every order that their waits allow: they agree at the end of a step,
apply its gradients, and commit into real files. A kill ends all of them, at any moment, also while they recover
from the one before. What a killed rank leaves is its memory alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rota.runtime.checkpoints import snapshots
from rota.runtime.checkpoints.snapshots import PARTIAL, Snapshots
from rota.runtime.checkpoints.tensors import Chunk, chunks_of
from rota.runtime.launcher_files import State, states_in

TRAINING = "0123456789abcdef"
NUM_STAGES, NUM_RANKS, NUM_STEPS, NUM_KILLS = 2, 4, 3, 2
PHASES = (*("voting", "voted", "chosen", "restored"), *("stepping", "agreeing", "optimizing", "committing", "copying"))

Applied = tuple[int, ...]  # the steps whose gradients the weights have seen, in order


class Rank(NamedTuple):
    """`step`: the one it is at, or the chosen one; `applied` is what its weights are, `memory` what it leaves."""

    stage: int
    phase: str
    step: int
    applied: Applied
    memory: Memory


class World(NamedTuple):
    """Ranks in any order, as peers do the same; how many kills there were; what they went on from at the last."""

    ranks: tuple[Rank, ...]
    num_kills: int
    resumed: int = 0


class Wrong(AssertionError):
    """A step was lost or done twice."""


Memory = frozenset[tuple[str, Applied]]  # the names of files, and what the state in each has seen


class Killed(Exception):
    """In the middle of a write."""


@cache
def whole_in(memory: Memory) -> frozenset[int]:
    """The steps that are whole."""
    with in_folder(memory) as folder:
        return frozenset(step for _, step in states_in(folder))


@contextmanager
def in_folder(memory: Memory) -> Iterator[Path]:
    """A folder with these files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        for file, applied in memory:
            writer(Path(name))._write(State(TRAINING, 0), *state_of(applied))
            os.rename(Path(name, State(TRAINING, 0).file), Path(name, f"moved-{file}"))
        for file, _ in memory:
            os.rename(Path(name, f"moved-{file}"), Path(name, file))
        yield Path(name)


def writer(folder: Path) -> Snapshots:
    """What a rank writes with."""
    made = Snapshots.__new__(Snapshots)
    made.folder, made._training, made._mapped = folder, TRAINING, {}
    return made


def state_of(applied: Applied) -> tuple[dict[Chunk, torch.Tensor], dict[str, Any]]:
    values = torch.tensor(applied)
    return chunks_of({"w": values}), {}


def memory_in(folder: Path) -> Memory:
    found = []
    for path in folder.iterdir():
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        found.append((path.name, tuple(torch.frombuffer(bytearray(data[begin:]), dtype=torch.int64).tolist())))
    return frozenset(found)


@cache
def changed(memory: Memory, act: str, step: int, applied: Applied) -> Memory:
    """The memory after a rank has begun to copy its state, has finished that, or has forgotten other steps."""
    with in_folder(memory) as folder, pytest.MonkeyPatch.context() as patch:
        rank = writer(folder)
        if act == "forget":
            rank.forget_all_but(step)
        else:
            rename = os.rename

            def until_the_last(source: Path, target: Path) -> None:
                if act == "begin" and target.name != PARTIAL:
                    raise Killed
                rename(source, target)

            patch.setattr(os, "rename", until_the_last)
            with suppress(Killed):
                rank._write(State(TRAINING, step), *state_of(applied))
        return memory_in(folder)


def has_reached(rank: Rank, phase: str, step: int) -> bool:
    """Whether a rank has come to a phase of a step, or further."""
    if PHASES.index(phase) < (first := PHASES.index("stepping")):
        return PHASES.index(rank.phase) >= PHASES.index(phase)
    return PHASES.index(rank.phase) >= first and (rank.step, PHASES.index(rank.phase)) >= (step, PHASES.index(phase))


def moved(rank: Rank, all_ranks: tuple[Rank, ...]) -> Rank | None:
    """What a rank does next; None if it waits, or is done."""
    stage, phase, step, applied, memory = rank
    match phase:
        case "voting":
            return rank._replace(phase="voted")
        case "voted":
            if not all(has_reached(other, "voted", 0) for other in all_ranks):
                return None
            return rank._replace(phase="chosen", step=newest(all_ranks))
        case "chosen":
            if not all(has_reached(other, "chosen", 0) for other in all_ranks):
                return None
            return rank._replace(phase="restored", applied=held(memory, step))
        case "restored":
            if not all(has_reached(other, "restored", 0) for other in all_ranks):
                return None
            return rank._replace(phase="stepping", memory=changed(memory, "forget", step, ()))
        case "stepping":
            return rank._replace(phase="agreeing") if step < NUM_STEPS else None
        case "agreeing":
            if not all(has_reached(other, "agreeing", step) for other in all_ranks):
                return None
            return rank._replace(phase="optimizing")
        case "optimizing":
            return rank._replace(phase="committing", applied=(*applied, step))
        case "committing":
            return rank._replace(phase="copying", memory=changed(memory, "begin", step + 1, applied))
        case _:
            return Rank(stage, "stepping", step + 1, applied, changed(memory, "finish", step + 1, applied))


def in_order(ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    return tuple(sorted(ranks, key=lambda rank: (*rank[:4], sorted(rank.memory))))


def newest(ranks: tuple[Rank, ...]) -> int:
    """The step that ranks go on from: the newest that all of them have, or 0, the beginning."""
    return max(frozenset.intersection(*(whole_in(rank.memory) for rank in ranks)), default=0)


def held(memory: Memory, step: int) -> Applied:
    return dict(memory)[State(TRAINING, step).file] if step else ()


def gone_on(world: World) -> World:
    """All ranks begin again with what is in their memories. Raises Wrong if that loses a step, or does one twice."""
    found = newest(world.ranks)
    furthest = max(len(rank.applied) for rank in world.ranks)
    if found < max(furthest - 1, world.resumed):
        raise Wrong(f"steps are lost: of {furthest}, {found} are left")
    if all(rank.phase == "stepping" for rank in world.ranks) and found < furthest:
        raise Wrong("a committed step is lost")
    for rank in world.ranks:
        if held(rank.memory, found) != tuple(range(found)):
            raise Wrong(f"the state of step {found} has seen {held(rank.memory, found)}")
    ranks = in_order(Rank(rank.stage, "voting", 0, (), rank.memory) for rank in world.ranks)
    return World(ranks, world.num_kills + 1, found)


def reachable(begin: World) -> Iterator[World]:
    seen, left = {begin}, [begin]
    while left:
        world = left.pop()
        yield world
        nexts = []
        for i, rank in enumerate(world.ranks):
            if (after := moved(rank, world.ranks)) is not None:
                nexts.append(world._replace(ranks=in_order((*world.ranks[:i], after, *world.ranks[i + 1 :]))))
        if world.num_kills < NUM_KILLS:
            nexts.append(gone_on(world))
        left += (new := {*nexts} - seen)
        seen |= new


def beginning() -> World:
    stages = (i * NUM_STAGES // NUM_RANKS for i in range(NUM_RANKS))
    return World(tuple(Rank(stage, "voting", 0, (), frozenset()) for stage in stages), 0)


def test_no_step_is_lost_or_done_twice_and_every_world_comes_to_an_end() -> None:
    """Ranks that wait for each other never wait in a circle."""
    kills = set()
    for world in reachable(beginning()):
        if all(rank.phase == "stepping" and rank.step == NUM_STEPS for rank in world.ranks):
            assert {rank.applied for rank in world.ranks} == {tuple(range(NUM_STEPS))}
            kills.add(world.num_kills)
        else:
            assert any(moved(rank, world.ranks) for rank in world.ranks)
    assert kills == {*range(NUM_KILLS + 1)}


def test_with_one_snapshot_steps_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "NUM_SNAPSHOTS", 1)
    changed.cache_clear()
    try:
        with pytest.raises(Wrong, match="lost"):
            list(reachable(beginning()))
    finally:
        changed.cache_clear()


@pytest.mark.parametrize("grows", [False, True])
def test_a_kill_within_a_write_leaves_what_was_whole(tmp_path: Path, grows: bool) -> None:
    """At each call of the system, and while the values are copied, the older state is there."""
    seen: list[set[int]] = []

    def look(frame: Any, *_: object) -> Any:
        if frame.f_code.co_filename == snapshots.__file__:
            seen.append({step for _, step in states_in(tmp_path)})
        return look

    rank = writer(tmp_path)
    for step in range(1, 6):
        values = (step,) * (100_000 if grows else 1000) * (step if grows else 1)
        seen.clear()
        sys.settrace(look)
        try:
            rank._write(State(TRAINING, step), *state_of(values))
        finally:
            sys.settrace(None)
        assert all({step - 1} - {0} <= steps for steps in seen)
        held = dict(memory_in(tmp_path))
        assert held[State(TRAINING, step).file] == values
        assert len(seen) > 10
    assert len(held) == 2
