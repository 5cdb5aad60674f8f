"""The protocol of docs/elastic.md, exhaustively: 2 stages in 2 replicas, and a kill between any two of their actions.

The model's ranks do what those of a run do, in every order that their waits allow: they agree at the end of a step,
apply its gradients, and commit into the real `Slots`. A kill ends all of them, at any moment, also while they recover
from the one before. What a killed rank leaves is its memory alone.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from rota.runtime import kept_memory
from rota.runtime.kept_memory import Slots
from support.checkpoint_runs import steps_in

NUM_STAGES, NUM_RANKS, NUM_STEPS, NUM_KILLS = 2, 4, 3, 2
PHASES = (
    *("voting", "voted", "chosen", "restored"),
    *("stepping", "agreeing", "optimizing", "committing", "copying"),
)

Applied = tuple[int, ...]  # the steps whose gradients the weights have seen, in order


class Rank(NamedTuple):
    """`step`: the one it is at, or the chosen one; `applied` is what its weights are, `memory` what it leaves."""

    stage: int
    phase: str
    step: int
    applied: Applied
    memory: bytes


class World(NamedTuple):
    """Ranks in any order, as peers do the same; how many kills there were; what they went on from at the last."""

    ranks: tuple[Rank, ...]
    num_kills: int
    resumed: int = 0


class Wrong(AssertionError):
    """A step was lost or done twice."""


# --- a rank's memory --------------------------------------------------------------------------------------------------


def image_of(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


@cache
def opened(image: bytes) -> tuple[frozenset[int], tuple[tuple[int, Applied], ...]]:
    """The whole steps of a memory, and what each one holds."""
    with_file = os.memfd_create("model")
    try:
        os.pwrite(with_file, image, 0)
        slots = Slots(with_file)
        held = tuple((step, tuple(slots.data(step))) for step in sorted(slots.steps))
        assert sorted(slots.steps) == sorted(steps_in(with_file))
        return frozenset(slots.steps), held
    finally:
        os.close(with_file)


@cache
def changed(image: bytes, act: str, step: int, applied: Applied) -> bytes:
    """The memory after a rank has begun to copy its state, has finished that, or has forgotten other steps."""
    with_file = os.memfd_create("model")
    try:
        os.pwrite(with_file, image, 0)
        slots = Slots(with_file)
        if act == "forget":
            for other in slots.steps.keys() - {step}:
                slots.drop(other)
        else:
            data = slots.begin(len(applied))
            data[:] = bytes(applied) if act == "finish" else b"\xff" * len(applied)
            if act == "finish":
                slots.finish(step, len(applied))
        return image_of(with_file)
    finally:
        os.close(with_file)


# --- the model --------------------------------------------------------------------------------------------------------


def has_reached(rank: Rank, phase: str, step: int) -> bool:
    """Whether a rank has come to a phase of a step, or further."""
    if PHASES.index(phase) < (first := PHASES.index("stepping")):
        return PHASES.index(rank.phase) >= PHASES.index(phase)
    return PHASES.index(rank.phase) >= first and (rank.step, PHASES.index(rank.phase)) >= (step, PHASES.index(phase))


def moved(rank: Rank, all_ranks: tuple[Rank, ...], agrees: bool) -> Rank | None:
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
            if agrees and not all(has_reached(other, "agreeing", step) for other in all_ranks):
                return None
            return rank._replace(phase="optimizing")
        case "optimizing":
            return rank._replace(phase="committing", applied=(*applied, step))
        case "committing":
            return rank._replace(phase="copying", memory=changed(memory, "begin", step + 1, applied))
        case _:
            return Rank(stage, "stepping", step + 1, applied, changed(memory, "finish", step + 1, applied))


def newest(ranks: tuple[Rank, ...]) -> int:
    """The step that ranks go on from: the newest that all of them have, or 0, the beginning."""
    return max(frozenset.intersection(*(opened(rank.memory)[0] for rank in ranks)), default=0)


def held(memory: bytes, step: int) -> Applied:
    return dict(opened(memory)[1])[step] if step else ()


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
    ranks = tuple(sorted(Rank(rank.stage, "voting", 0, (), rank.memory) for rank in world.ranks))
    return World(ranks, world.num_kills + 1, found)


def reachable(begin: World, agrees: bool) -> Iterator[World]:
    seen, left = {begin}, [begin]
    while left:
        world = left.pop()
        yield world
        nexts = []
        for i, rank in enumerate(world.ranks):
            if (after := moved(rank, world.ranks, agrees)) is not None:
                ranks = sorted((*world.ranks[:i], after, *world.ranks[i + 1 :]))
                nexts.append(world._replace(ranks=tuple(ranks)))
        if world.num_kills < NUM_KILLS:
            nexts.append(gone_on(world))
        left += (new := {*nexts} - seen)
        seen |= new


@cache
def fresh_memory() -> bytes:
    file = os.memfd_create("model")
    try:
        Slots(file)
        return image_of(file)
    finally:
        os.close(file)


def new_rank(stage: int) -> Rank:
    return Rank(stage, "voting", 0, (), fresh_memory())


def beginning() -> World:
    return World(tuple(new_rank(i * NUM_STAGES // NUM_RANKS) for i in range(NUM_RANKS)), 0)


def test_no_step_is_lost_or_done_twice() -> None:
    kills = set()
    for world in reachable(beginning(), agrees=True):
        if all(rank.phase == "stepping" and rank.step == NUM_STEPS for rank in world.ranks):
            assert {rank.applied for rank in world.ranks} == {tuple(range(NUM_STEPS))}
            kills.add(world.num_kills)
    assert kills == {*range(NUM_KILLS + 1)}


def test_every_world_comes_to_an_end() -> None:
    """Ranks that wait for each other never wait in a circle."""
    for world in reachable(beginning(), agrees=True):
        is_over = all(rank.phase == "stepping" and rank.step == NUM_STEPS for rank in world.ranks)
        assert is_over or any(moved(rank, world.ranks, agrees=True) for rank in world.ranks)


def test_without_agreement_steps_would_be_lost() -> None:
    with pytest.raises(Wrong, match="lost"):
        list(reachable(beginning(), agrees=False))


def test_with_one_slot_steps_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory, "NUM_SLOTS", 1)
    opened.cache_clear()
    changed.cache_clear()
    try:
        with pytest.raises(Wrong, match="lost"):
            list(reachable(beginning(), agrees=True))
    finally:
        opened.cache_clear()
        changed.cache_clear()


# --- within one action ------------------------------------------------------------------------------------------------


def test_a_kill_within_a_write_leaves_what_was_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header takes three writes, and the memory grows in the middle: after each one the older state is there."""
    file = os.memfd_create("model")
    try:
        slots, images = Slots(file), []
        real = struct.pack_into

        def noted(*arguments: object) -> None:
            real(*arguments)  # type: ignore[arg-type]
            images.append(image_of(file))

        monkeypatch.setattr(struct, "pack_into", noted)
        for step in (1, 2, 3, 4):
            images.clear()
            data = slots.begin(size := 10_000 * step)  # larger every time
            data[:] = bytes([step]) * size
            slots.finish(step, size)
            for number, image in enumerate(images):
                whole, contents = opened(image)
                is_last = number == len(images) - 1
                assert whole - {step - 1, step - 2} == ({step} if is_last else frozenset())
                assert step == 1 or dict(contents)[step - 1] == (step - 1,) * (10_000 * (step - 1))
            assert len(images) >= 6
    finally:
        os.close(file)
