"""Without names of modules, stages of an unmodified model have about as many parameters each; a text is one pattern."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rota
from rota import SplitError, Stages
from rota.models import finest


class Towers(nn.Module):
    """Many small blocks before few large ones, with an embedding that has more parameters than all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, 8)
        self.vision = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.widen = nn.Linear(8, 64)
        self.language = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.vision:
            x = block(x)
        x = self.widen(x)
        for block in self.language:
            x = block(x)
        return x


IDS = {"ids": torch.tensor([[1, 2]])}


def test_blocks_are_weighed_by_their_parameters() -> None:
    assert rota.split(Towers(), 2, example=IDS).cuts == ("language.2",)
    assert rota.split(Towers(), 4, example=IDS).cuts == ("language.1", "language.2", "language.3")
    assert rota.split(Towers(), 2, ["vision.*"], example=IDS).cuts == ("vision.7",)


def test_equal_blocks_are_spread_evenly() -> None:
    model = Towers()
    model.vision = nn.ModuleList()
    for num_stages in (2, 3, 4):
        sizes = [len(stage.holds) for stage in rota.split(model, num_stages, example=IDS).modules]  # type: ignore[union-attr, arg-type]
        assert sum(sizes) == 6
        assert len({*sizes[1:]}) <= 2


def test_a_text_is_one_cut_or_pattern() -> None:
    assert rota.split(Towers(), 2, "language.*", example=IDS).cuts == ("language.2",)
    assert rota.split(Towers(), 2, "widen", example=IDS).cuts == ("widen",)
    assert finest(Towers(), IDS, "language.*")[1] == tuple(f"language.{i}" for i in range(4))
    sequential = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    assert rota.split(sequential, 2, "10").cuts == ("10",)
    assert finest(sequential, cuts="10")[1] == ("10",)
    assert Stages([nn.Linear(2, 2)], inputs={0: "ids"}, input_names="ids").input_names == ("ids",)
    for argument in ("names", "inputs"):
        with pytest.raises(SplitError, match=rf"{argument} is the text 'ab': give a list with one entry per stage"):
            Stages([nn.Linear(2, 2), nn.Linear(2, 2)], **{argument: "ab"})
