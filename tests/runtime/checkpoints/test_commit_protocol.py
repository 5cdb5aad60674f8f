"""The protocol of docs/elastic.md, exhaustively: 2 stages in 2 replicas, and a kill between any two of their actions.

After a kill all ranks begin again, or one is lost for good and the others go on, until a new one joins them.

The model's ranks do what those of a run do, in every order that their waits allow: they agree at the end of a step,
apply its gradients, and commit into the real `Slots`. Half of a state stands for the weights, which are copied at once,
half for the optimizer's own, which lies in the memory from the first commit on and is copied beside the next step. A
kill ends all of them, at any moment, also while they recover from the one before. What a killed rank leaves is its
memory alone.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import NamedTuple

import pytest

from rota.runtime import kept_memory
from rota.runtime.kept_memory import Slots, steps_in

NUM_RANKS, NUM_STEPS, NUM_KILLS = 4, 3, 2
PHASES = (
    *("voting", "voted", "restored", "stepping", "agreeing"),
    *("completing", "optimizing", "committing", "copying"),
)

Applied = tuple[int, ...]  # the steps whose gradients the weights have seen, in order
END, COPYING = 0xFE, 0xFF  # bytes: nothing follows; anything may be here


class Rank(NamedTuple):
    """`step`: the one it is at, or the restored one; `applied` is what its weights are, `memory` what it leaves.

    `is_moved`: its optimizer's tensors lie in the memory.
    """

    phase: str
    step: int
    applied: Applied
    memory: bytes
    is_moved: bool = False


class World(NamedTuple):
    """Ranks in any order, as all of them do the same; how many kills there were; what they went on from at the last.

    A rank that is missing was lost.
    """

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
        held = tuple((step, state_in(slots, step)) for step in sorted(slots.steps))
        assert sorted(slots.steps) == sorted(steps_in(with_file))
        return frozenset(slots.steps), held
    finally:
        os.close(with_file)


def half(applied: Applied) -> bytes:
    """Weights, or what the optimizer has beside them."""
    return (bytes(applied) + bytes([END] * NUM_STEPS))[:NUM_STEPS]


def state_in(slots: Slots, step: int) -> Applied:
    """A whole state. Raises Wrong if its weights are not those that its optimizer has seen."""
    data = bytes(slots.data(step))
    weights, optimizers = data[:NUM_STEPS], data[NUM_STEPS:]
    if slots.step_in_use == step:
        if not slots.leans(step) and bytes(slots.in_use) != optimizers:
            raise Wrong("the copy and the tensors in use differ")
        optimizers = bytes(slots.in_use)
    if weights != optimizers:
        raise Wrong(f"the weights of step {step} have seen {weights!r}, the optimizer {optimizers!r}")
    return tuple(byte for byte in weights if byte != END)


@cache
def in_use_of(image: bytes) -> int:
    """The step after which the tensors in use are the state; -1 if they may be anything."""
    with_file = os.memfd_create("model")
    try:
        os.pwrite(with_file, image, 0)
        return Slots(with_file).step_in_use
    finally:
        os.close(with_file)


@cache
def changed(image: bytes, act: str, step: int, applied: Applied) -> bytes:
    """The memory after one act of a rank, which gives it `step` or leaves it as it is."""
    with_file = os.memfd_create("model")
    try:
        os.pwrite(with_file, image, 0)
        slots, garbage = Slots(with_file), bytes([COPYING] * NUM_STEPS)
        match act:
            case "forget":
                slots.drop_all_but(step)
            case "complete":
                slots.data(step)[NUM_STEPS:] = slots.in_use
                slots.complete(step)
            case "optimize":  # half of what the optimizer writes is there
                slots.release()
                slots.in_use[:] = garbage[: len(slots.in_use)]
            case "begin":  # the optimizer is done, and half of the weights are copied
                slots.in_use[:] = half(applied)[: len(slots.in_use)]
                slots.begin(2 * NUM_STEPS)[:] = 2 * garbage
            case "lean":
                slots.begin(2 * NUM_STEPS)[:] = half(applied) + garbage
                slots.finish(step, 2 * NUM_STEPS, leans=True)
                slots.use(step)
            case _:  # "move", after a copy of all
                slots.begin(2 * NUM_STEPS)[:] = 2 * half(applied)
                slots.finish(step, 2 * NUM_STEPS)
                slots.make_room_in_use(NUM_STEPS)[:] = half(applied)
        return image_of(with_file)
    finally:
        os.close(with_file)


# --- the model --------------------------------------------------------------------------------------------------------


def has_reached(rank: Rank, phase: str, step: int) -> bool:
    """Whether a rank has come to a phase of a step, or further."""
    if PHASES.index(phase) < 3:
        return PHASES.index(rank.phase) >= PHASES.index(phase)
    return PHASES.index(rank.phase) >= 3 and (rank.step, PHASES.index(rank.phase)) >= (step, PHASES.index(phase))


def moved(rank: Rank, all_ranks: tuple[Rank, ...], agrees: bool, completes: bool = True) -> Rank | None:
    """What a rank does next; None if it waits, or is done."""
    phase, step, applied, memory, is_moved = rank
    match phase:
        case "voting":
            return rank._replace(phase="voted")
        case "voted":
            if not all(has_reached(other, "voted", 0) for other in all_ranks):
                return None
            found = newest(all_ranks)
            adopts = found > 0 and in_use_of(memory) == found
            return rank._replace(phase="restored", step=found, applied=held(memory, found), is_moved=adopts)
        case "restored":
            if not all(has_reached(other, "restored", 0) for other in all_ranks):
                return None
            return rank._replace(phase="stepping", memory=changed(memory, "forget", step, ()))
        case "stepping":
            return rank._replace(phase="agreeing") if step < NUM_STEPS else None
        case "agreeing":
            if agrees and not all(has_reached(other, "agreeing", step) for other in all_ranks):
                return None
            return rank._replace(phase="completing" if is_moved else "optimizing")
        case "completing":
            leans = completes and in_use_of(memory) == step
            return rank._replace(phase="optimizing", memory=changed(memory, "complete", step, ()) if leans else memory)
        case "optimizing":
            applied = (*applied, step)
            return rank._replace(phase="committing", applied=applied, memory=changed(memory, "optimize", 0, ()))
        case "committing":
            return rank._replace(phase="copying", memory=changed(memory, "begin", 0, applied))
        case _:
            act = "lean" if is_moved else "move"
            return Rank("stepping", step + 1, applied, changed(memory, act, step + 1, applied), is_moved=True)


def newest(ranks: tuple[Rank, ...]) -> int:
    """The step that ranks go on from: the newest that all of them have, or 0, the beginning."""
    return max(frozenset.intersection(*(opened(rank.memory)[0] for rank in ranks)), default=0)


def held(memory: bytes, step: int) -> Applied:
    return dict(opened(memory)[1])[step] if step else ()


def ways_to_go_on(world: World) -> Iterator[World]:
    """After a kill of all ranks: with the same ones, without one of them, or with a new one beside them.

    The new one gets its peer's memory. A model's rank does not know its stage, so each of the others may be its peer.
    """
    ranks = world.ranks
    yield gone_on(world, ranks)
    for i, rank in enumerate(ranks):
        yield gone_on(world, (*ranks[:i], *ranks[i + 1 :]) if len(ranks) == NUM_RANKS else (*ranks, rank))


def gone_on(world: World, left: tuple[Rank, ...]) -> World:
    """These ranks begin again with what is in their memories. Raises Wrong if that loses a step, or does one twice."""
    found = newest(left)
    furthest = max(len(rank.applied) for rank in world.ranks)
    if found < max(furthest - 1, world.resumed):
        raise Wrong(f"steps are lost: of {furthest}, {found} are left")
    if all(rank.phase == "stepping" for rank in world.ranks) and found < furthest:
        raise Wrong("a committed step is lost")
    for rank in left:
        if held(rank.memory, found) != tuple(range(found)):
            raise Wrong(f"the state of step {found} has seen {held(rank.memory, found)}")
    ranks = tuple(sorted(Rank("voting", 0, (), rank.memory) for rank in left))
    return World(ranks, world.num_kills + 1, found)


def reachable(begin: World, agrees: bool, completes: bool = True) -> Iterator[World]:
    seen, left = {begin}, [begin]
    while left:
        world = left.pop()
        yield world
        nexts = []
        for i, rank in enumerate(world.ranks):
            if (after := moved(rank, world.ranks, agrees, completes)) is not None:
                ranks = sorted((*world.ranks[:i], after, *world.ranks[i + 1 :]))
                nexts.append(world._replace(ranks=tuple(ranks)))
        if world.num_kills < NUM_KILLS:
            nexts += ways_to_go_on(world)
        left += (new := {*nexts} - seen)
        seen |= new


def fresh_memory() -> bytes:
    file = os.memfd_create("model")
    try:
        Slots(file)
        return image_of(file)
    finally:
        os.close(file)


def beginning() -> World:
    return World((Rank("voting", 0, (), fresh_memory()),) * NUM_RANKS, 0)


def test_no_step_is_lost_or_done_twice() -> None:
    """And every world comes to an end: ranks that wait for each other never wait in a circle."""
    num_ends, sizes = 0, set()
    for world in reachable(beginning(), agrees=True):
        if all(rank.phase == "stepping" and rank.step == NUM_STEPS for rank in world.ranks):
            assert {rank.applied for rank in world.ranks} == {tuple(range(NUM_STEPS))}
            num_ends += 1
            sizes.add((world.num_kills, len(world.ranks)))
        else:
            assert any(moved(rank, world.ranks, agrees=True) for rank in world.ranks)
    assert num_ends >= NUM_KILLS + 1  # after no kill, one, and two
    assert sizes == {(0, 4), (1, 4), (1, 3), (2, 4), (2, 3)}


def test_without_agreement_steps_would_be_lost() -> None:
    with pytest.raises(Wrong, match="lost"):
        list(reachable(beginning(), agrees=False))


def test_without_a_copy_before_the_optimizer_steps_would_be_lost() -> None:
    with pytest.raises(Wrong, match="lost"):
        list(reachable(beginning(), agrees=True, completes=False))


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


@contextmanager
def each_write(file: int) -> Iterator[list[Slots]]:
    """Views of copies of the memory after each write to a header."""
    seen: list[Slots] = []
    real = struct.pack_into

    def noted(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        os.pwrite(copied := os.memfd_create("model"), image_of(file), 0)
        files.callback(os.close, copied)
        seen.append(Slots(copied))

    with ExitStack() as files, pytest.MonkeyPatch.context() as patch:
        patch.setattr(struct, "pack_into", noted)
        yield seen


def test_a_kill_within_a_write_leaves_what_was_whole() -> None:
    """A header takes three writes, and the memory grows in the middle: after each one the older state is there."""
    file = os.memfd_create("model")
    try:
        slots = Slots(file)
        for step in (1, 2, 3, 4):
            with each_write(file) as seen:
                data = slots.begin(size := 10_000 * step)  # larger every time
                data[:] = bytes([step]) * size
                slots.finish(step, size)
                for view in seen:
                    is_last = view is seen[-1]
                    assert view.steps.keys() - {step - 1, step - 2} == ({step} if is_last else set())
                    assert step == 1 or bytes(view.data(step - 1)) == bytes([step - 1]) * (10_000 * (step - 1))
                assert len(seen) >= 6
    finally:
        os.close(file)


def test_a_kill_within_a_write_of_tensors_in_use_leaves_what_was_whole() -> None:
    """A state in a slot and in tensors in use, which become that of another step."""
    file = os.memfd_create("model")
    try:
        slots = Slots(file)
        slots.begin(2)[:] = b"\1\1"
        slots.finish(1, 2)
        slots.make_room_in_use(1)
        for step in (2, 3, 4):
            slots.in_use[:] = bytes([step])
            with each_write(file) as seen:
                slots.begin(2)[:] = bytes([step, COPYING])
                slots.finish(step, 2, leans=True)
                slots.use(step)
                for view in seen:
                    assert bytes(view.data(step - 1)) == bytes([step - 1, step - 1])
                    assert (step in view.steps) is (view is seen[-1])
                assert (seen[-1].leans(step), bytes(seen[-1].in_use)) == (True, bytes([step]))
            with each_write(file) as seen:
                slots.data(step)[1:] = slots.in_use
                slots.complete(step)
                slots.release()
                complete, released = seen
                assert [view.leans(step) for view in seen] == [False, False]
                assert [bytes(view.data(step)) for view in seen] == [bytes([step, step])] * 2
                assert (complete.step_in_use, released.step_in_use) == (step, -1)
    finally:
        os.close(file)


def test_what_leans_goes_with_what_it_leans_on() -> None:
    file = os.memfd_create("model")
    try:
        slots = Slots(file)
        slots.make_room_in_use(1)[:] = b"\7"
        slots.begin(2)
        slots.finish(7, 2, leans=True)
        assert steps_in(file) == []
        slots.use(7)
        slots.drop_all_but(7)
        assert (steps_in(file), slots.step_in_use) == ([7], 7)
        slots.drop_all_but(None)
        assert (steps_in(file), slots.step_in_use) == ([], -1)
        slots.use(7)
        assert steps_in(file) == []  # the slot was dropped by itself, too
    finally:
        os.close(file)
