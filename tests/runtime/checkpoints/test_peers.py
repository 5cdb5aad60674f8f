"""A new rank takes the state of a step out of its peer's memory: 2 stages in 2 replicas, of which one rank is new."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from rota.runtime.checkpoints import in_memory, peers
from rota.runtime.checkpoints.all_ranks import Ranks
from rota.runtime.checkpoints.in_memory import StatesInMemory
from rota.runtime.checkpoints.peers import Votes, common_steps
from rota.runtime.environment import new_environment
from rota.runtime.kept_memory import NUM_SLOTS, Slots, State, room_for, states_in
from support.pool import Pool


def test_only_a_new_rank_with_a_peer_has_no_vote() -> None:
    both, newer = {3, 4}, {4, 5}
    assert common_steps([("a", False, both), ("b", False, newer), ("a", True, set()), ("b", False, newer)]) == {4}
    assert common_steps([("a", False, both), ("b", False, newer), ("a", False, set())]) == set()  # its state was lost
    assert common_steps([("a", True, set()), ("b", False, newer), ("a", True, set())]) == set()  # nobody has stage a
    assert common_steps([("a", True, set()), ("b", True, set())]) == set()


def data_of(stage: int, step: int, folder: str = "run") -> bytes:
    text = json.dumps({"folder": folder}).encode()
    return struct.pack("<Q", len(text)) + text + bytes([stage, step]) * 50_000


def kept(rank: int, *steps: int, folder: str = "run") -> tuple[int, StatesInMemory]:
    """The memory of a rank that holds some steps."""
    file = os.memfd_create("rank")
    slots = Slots(file)
    for step in steps:
        data = data_of(rank % 2, step, folder)
        slots.begin(len(data))[:] = data
        slots.finish(step, len(data))
    return file, StatesInMemory(file, None, f"stage {rank % 2}", "run", 0)  # type: ignore[arg-type]


def take(rank: int, has_room: bool) -> tuple[set[int], int | None, list[State], bool]:
    """Rank 2 is new: what all agree on, who lacks room, which states are held, and whether they are the peer's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "_PIECE_BYTES", 30_000)
        if rank == 2:
            patch.setenv(*next(iter(new_environment().items())))
            patch.setattr(in_memory, "available_bytes", lambda: 1 << 40 if has_room else 1000)
        file, memory = kept(rank, *({0: (3, 4), 1: (4, 5), 2: (), 3: (4,)}[rank]))
        votes = Votes(memory, Ranks(dist.group.WORLD, False))  # type: ignore[arg-type]
        found = votes.common
        lacking = votes.take(max(found))
        held = states_in(file)
        is_same = State(0, 4) in held and bytes(memory.data(4)) == data_of(rank % 2, 4)
        os.close(file)
        return found, lacking, sorted(held), is_same


@pytest.mark.dist
def test_a_new_rank_has_its_peers_state(pool: Pool) -> None:
    told = pool.run(4, take, True)
    assert [(found, lacking) for found, lacking, *_ in told] == [({4}, None)] * 4
    assert [[step for _, step in held] for *_, held, _ in told] == [[3, 4], [4, 5], [4], [4]]
    assert all(is_same for *_, is_same in told)


@pytest.mark.dist
def test_without_room_nobody_takes_anything(pool: Pool) -> None:
    told = pool.run(4, take, False)
    assert [(found, lacking) for found, lacking, *_ in told] == [({4}, 2)] * 4
    assert [[step for _, step in held] for *_, held, _ in told] == [[3, 4], [4, 5], [], [4]]


def take_two(rank: int, taken: Path) -> int | None:
    """Ranks 2 and 3 are new, and the machine has just enough memory for both; 3 looks at it late."""
    with pytest.MonkeyPatch.context() as patch:
        _, memory = kept(rank, *([4] if rank < 2 else []))
        if rank >= 2:
            needed_bytes = 2 * NUM_SLOTS * room_for(len(data_of(0, 4)))
            patch.setenv(*next(iter(new_environment().items())))

            def available_bytes() -> int:
                until_s = time.monotonic() + 0.5
                while rank == 3 and not taken.exists() and time.monotonic() < until_s:
                    time.sleep(0.01)
                return needed_bytes - taken.exists()

            def begin(slots: Slots, num_bytes: int) -> memoryview:
                if rank == 2:
                    taken.touch()
                return begun(slots, num_bytes)

            begun = Slots.begin
            patch.setattr(in_memory, "available_bytes", available_bytes)
            patch.setattr(Slots, "begin", begin)
        votes = Votes(memory, Ranks(dist.group.WORLD, False))  # type: ignore[arg-type]
        return votes.take(max(votes.common))


@pytest.mark.dist
def test_what_one_new_rank_takes_does_not_count_against_another(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(4, take_two, tmp_path / "taken") == [None] * 4
    assert (tmp_path / "taken").exists()


def vote(rank: int) -> set[int]:
    """Rank 2 was missing before, but has kept a state of another training since, so none of this one is common."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setenv(*next(iter(new_environment().items())))
        file, memory = kept(rank, 4, folder="another" if rank == 2 else "run")
        found = Votes(memory, Ranks(dist.group.WORLD, False)).common  # type: ignore[arg-type]
        os.close(file)
        return found


@pytest.mark.dist
def test_a_rank_with_the_state_of_another_training_is_not_new(pool: Pool) -> None:
    assert pool.run(4, vote) == [set()] * 4
