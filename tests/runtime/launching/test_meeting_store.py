"""The store in which ranks of several nodes meet: as PyTorch's own, on the leader's node and on a follower's."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from rota.errors import FormatError
from rota.reading import Field
from rota.runtime import node_store
from rota.runtime.launching.meeting_store import (
    FollowersStore,
    LeadersStore,
    StoreError,
    StoreServer,
    address,
    answered,
)


def stores(stack: ExitStack) -> tuple[LeadersStore, FollowersStore]:
    """A leader's and a follower's, which tell each other at once."""
    leader = LeadersStore(lambda start, key, value: follower.note(message(start=start, key=key, value=value)))
    follower = FollowersStore(
        lambda number, request: follower.answer(message(number=number, **answered(leader, message(**request))))
    )
    return leader, follower


def message(**fields: Any) -> Field:
    return Field("message", fields)


@pytest.fixture
def both() -> Iterator[tuple[Any, Any]]:
    """A rank's store on each node, for the start with the number 3."""
    with ExitStack() as stack:
        of_ranks = []
        for each in stores(stack):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rota-test-"))
            each.begin(3)
            stack.enter_context(StoreServer(folder, each))
            of_ranks.append(node_store.at(address(folder, 3)))
        yield of_ranks[0], of_ranks[1]


def test_it_does_what_a_store_of_pytorch_does(both: tuple[Any, Any]) -> None:
    """Whichever node's rank asks: the same answers."""
    draw, expected = random.Random(0), PrefixStore("x", HashStore())
    ours = [PrefixStore("x", store) for store in both]
    for _ in range(150):
        store, key = draw.choice(ours), f"key {draw.randrange(4)}"
        match draw.randrange(5):
            case 0:
                value = draw.choice(["", "7", "a b", "ä"])
                found = [each.set(key, value) for each in (store, expected)]
            case 1:
                found = [each.check([key, "key 0"]) for each in (store, expected)]
            case 2:
                found = [each.add(f"sum {key}", 5) for each in (store, expected)]
            case 3:
                words = draw.choice(["", "7"]), draw.choice(["7", "b"])
                found = [each.compare_set(key, *words) for each in (store, expected)]
            case _:
                found = [each.delete_key(key) for each in (store, expected)]
        assert found[0] == found[1]
        if expected.check([key]):
            assert {each.get(key) for each in (*ours, expected)} == {expected.get(key)}


def test_bytes_stay_bytes_and_a_rank_waits_for_another(both: tuple[Any, Any]) -> None:
    of_leader, of_follower = both
    every_byte = bytes(range(256))
    later = threading.Timer(0.1, lambda: of_follower.set("a", every_byte))
    later.start()
    assert of_leader.get("a") == every_byte
    assert of_follower.clone().get("a") == every_byte
    assert of_leader.num_keys() == of_follower.num_keys() == 1
    of_leader.wait(["a"], timedelta(seconds=1))
    with pytest.raises(RuntimeError, match=r"the store has no 'b' after 0\.01 s"):
        of_leader.wait(["b"], timedelta(seconds=0.01))
    with pytest.raises(RuntimeError, match="is not a number"):
        of_follower.add("a", 1)
    with pytest.raises(RuntimeError, match="takes 131,072 bytes per value"):
        of_leader.set("a", "x" * 200_000)
    later.join()


def test_a_value_may_come_before_the_start_that_it_is_of() -> None:
    """Node 0 tells one node after another of a start, and ranks of the first one may be fast."""
    with ExitStack() as stack:
        leader, follower = stores(stack)
        leader.begin(3)
        follower.begin(3)
        leader.act(message(do="set", start=3, key="old", value="1"))
        leader.begin(4)
        leader.act(message(do="set", start=4, key="new", value="2"))
        follower.begin(4)
        of_key = {key: follower.act(message(do="get", start=4, key=key)) for key in ("old", "new")}
        assert of_key == {"old": None, "new": "2"}


def test_ranks_of_an_earlier_start_are_refused() -> None:
    with ExitStack() as stack:
        leader, follower = stores(stack)
        for each in (leader, follower):
            each.begin(1)
        late = {"do": "set", "start": 0, "key": "here", "value": ""}
        for each in (leader, follower):
            with pytest.raises(StoreError, match="the ranks were started again"):
                each.act(message(**late))
        follower.act(message(**late | {"start": 1}))
        assert leader.act(message(do="check", start=1, keys=["here"])) is True
        for each in (leader, follower):
            each.begin(2)
            assert each.act(message(do="count", start=2)) == 0


@pytest.mark.parametrize(
    "request_",
    [{}, {"do": 3, "start": 1}, {"do": "eval", "start": 1}, {"do": "set", "start": 1, "key": [], "value": ""}],
)
def test_what_is_no_request_is_refused(request_: dict[str, Any]) -> None:
    leader, _ = stores(ExitStack())
    leader.begin(1)
    with pytest.raises((StoreError, FormatError)):
        leader.act(message(**request_))
