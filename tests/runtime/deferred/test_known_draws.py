"""A process that is started again draws nothing that was drawn before: its weights and generator are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import rota
from rota import Stages
from rota.runtime.deferred import construction, known_draws


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """As in a run that restarts its ranks; has the bytes of each draw."""
    monkeypatch.setenv("ROTA_FOLDER", str(tmp_path))
    monkeypatch.setenv("ROTA_KEPT_MEMORY", "0")
    monkeypatch.setattr(construction, "SMALL_BYTES", 0)
    drawn: list[int] = []
    real = construction._scratch

    def counted(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
        drawn.append(num_bytes)
        return real(num_bytes, device)

    monkeypatch.setattr(construction, "_scratch", counted)
    return drawn


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def truncated() -> nn.Module:
    layer = nn.Linear(8, 8)
    nn.init.trunc_normal_(layer.weight, std=0.5)
    nn.init.orthogonal_(layer.weight[:4])
    return layer


def reading() -> nn.Module:
    """What it draws last depends on what it has drawn first."""
    layer = nn.Linear(3, 5)
    with torch.no_grad():
        if layer.weight.sum().item() > 0:
            layer.weight.normal_()
        else:
            layer.weight.uniform_(2, 3)
    layer.extra = nn.Parameter(torch.randn(7))  # type: ignore[assignment]
    return layer


def with_a_generator() -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(5))
    return layer


def in_double() -> nn.Module:
    layer = linears().double()
    layer[0].extra = nn.Parameter(torch.rand(5, dtype=torch.float64))  # type: ignore[index,assignment]
    return layer


MAKES = [linears, truncated, reading, with_a_generator, in_double]


def started(make: Callable[[], nn.Module], seed: int = 1) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The weights of a process that makes the model so, and what it draws afterwards."""
    torch.manual_seed(seed)
    with rota.deferred_init():
        model = make()
    after = torch.rand(4)
    rota.materialize(Stages([model]), [0])
    return [parameter.detach() for parameter in model.parameters()], after


def undeferred(make: Callable[[], nn.Module], seed: int = 1) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(seed)
    model = make()
    return [parameter.detach() for parameter in model.parameters()], torch.rand(4)


def assert_same(one: tuple[list[torch.Tensor], torch.Tensor], other: tuple[list[torch.Tensor], torch.Tensor]) -> None:
    assert len(one[0]) == len(other[0])
    assert all(map(torch.equal, one[0], other[0]))
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("make", MAKES)
def test_a_process_that_is_started_again_draws_only_its_weights(
    make: Callable[[], nn.Module], draws: list[int]
) -> None:
    expected = undeferred(make)
    assert_same(started(make), expected)
    assert draws
    draws.clear()
    assert_same(started(make), expected)
    assert not draws


@pytest.mark.parametrize("make", MAKES)
def test_another_seed_is_drawn(make: Callable[[], nn.Module], draws: list[int]) -> None:
    started(make)
    draws.clear()
    assert_same(started(make, 2), undeferred(make, 2))
    assert draws


def test_only_what_has_changed_is_drawn(draws: list[int]) -> None:
    def more() -> nn.Module:
        return nn.Sequential(*linears(), nn.Linear(4, 4))  # type: ignore[misc]

    started(linears)
    num_drawn = len(draws)
    draws.clear()
    assert_same(started(more), undeferred(more))
    assert 0 < len(draws) < num_drawn


def test_the_same_state_and_another_draw_are_told_apart(draws: list[int]) -> None:
    """They would leave the generator in other states, or the weights in another dtype."""
    fills: list[Callable[[], torch.Tensor]] = [
        lambda: torch.empty(40).normal_(),
        lambda: torch.empty(39).normal_(),
        lambda: torch.empty(40).uniform_(),
        lambda: torch.empty(40, dtype=torch.float64).normal_(),
        lambda: torch.empty(40).exponential_(),
        lambda: torch.randn(40),
        lambda: torch.randn(40, dtype=torch.float64),
        lambda: torch.randn(8, 6).t(),
    ]

    def layer_of(fill: Callable[[], torch.Tensor]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            layer = nn.Module()
            layer.weight = nn.Parameter(fill())
            return layer

        return make

    for _ in range(2):
        for fill in fills:
            assert_same(started(layer_of(fill)), undeferred(layer_of(fill)))
    assert len(draws) == 5  # the first five, once


def test_nothing_is_noted_in_a_run_without_restarts(draws: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROTA_KEPT_MEMORY")
    for _ in range(2):
        draws.clear()
        started(linears)
        assert draws


def test_a_full_disk_costs_only_time(draws: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for _ in range(2):
        draws.clear()
        assert_same(started(linears), undeferred(linears))
        assert draws


def test_no_more_draws_are_noted_than_there_is_room_for(
    draws: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(known_draws, "_MOST", 1)
    expected = undeferred(linears)
    num_drawn = []
    for _ in range(2):
        draws.clear()
        assert_same(started(linears), expected)
        num_drawn.append(len(draws))
    assert num_drawn[1] == num_drawn[0] - 1
    assert [path.name for path in tmp_path.iterdir()] == ["draws"]
