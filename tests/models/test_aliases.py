"""Weights on one memory that are not one parameter: refused where stages would lose what they share."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from rota import CutPoint, SplitError, Stages, meta_init, split

WIDTH = 4
EXAMPLE = {"x": torch.ones(2, WIDTH)}


class Model(nn.Module):
    """Four layers, of which the last one shares something with the first."""

    def __init__(self, tie: Callable[[Any], None], has_cuts: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.cuts = [CutPoint() if has_cuts else nn.Identity() for _ in range(4)]
        tie(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer, cut in zip(self.layers, self.cuts, strict=True):
            x = cut(layer(x))
        return x


def by_data(layers: Any) -> None:
    layers[3].weight = nn.Parameter(layers[0].weight.data)


def transposed(layers: Any) -> None:
    layers[3].weight = nn.Parameter(layers[0].weight.data.t())


def crossing(layers: Any) -> None:
    """A column and a row of one matrix."""
    both = torch.ones(WIDTH, WIDTH)
    layers[0].bias, layers[3].bias = nn.Parameter(both[:, 2]), nn.Parameter(both[1])


def a_buffer(layers: Any) -> None:
    layers[3].register_buffer("first", layers[0].weight.detach())


def an_attribute(layers: Any) -> None:
    layers[3].first = layers[0].weight.data


def in_a_list(layers: Any) -> None:
    layers[3].first = [layers[0].weight]


def one_parameter(layers: Any) -> None:
    layers[3].weight = layers[0].weight


def within_a_stage(layers: Any) -> None:
    layers[1].weight = nn.Parameter(layers[0].weight.data)
    layers[1].register_buffer("first", layers[0].weight.detach())
    layers[1].list = [layers[0].weight]


def frozen(layers: Any) -> None:
    layers[3].weight = nn.Parameter(layers[0].weight.data)
    for layer in layers:
        layer.requires_grad_(False)


def columns(layers: Any) -> None:
    both = torch.ones(WIDTH, 2 * WIDTH)
    layers[0].weight, layers[3].weight = map(nn.Parameter, both.chunk(2, dim=1))


def buffers(layers: Any) -> None:
    mask = torch.ones(WIDTH)
    for layer in layers:
        layer.register_buffer("mask", mask.view(1, WIDTH))


def normalised(layers: Any) -> None:
    """An attribute of each layer is a view of its weight."""
    for layer in layers:
        spectral_norm(layer)


def carved(tie: Callable[[Any], None]) -> Stages:
    return split(Model(tie), 2, example=EXAMPLE)


def at_cut_points(tie: Callable[[Any], None]) -> Stages:
    return split(Model(tie, has_cuts=True), 2, cuts=[1], example=EXAMPLE)


def sequential(tie: Callable[[Any], None]) -> Stages:
    return split(nn.Sequential(*Model(tie).layers), 2)


def by_hand(tie: Callable[[Any], None]) -> Stages:
    layers = [*Model(tie).layers]
    return Stages([nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])])


def on_meta(tie: Callable[[Any], None]) -> Stages:
    with torch.device("meta"):
        return sequential(tie)


def without_memory(tie: Callable[[Any], None]) -> Stages:
    with meta_init():
        model = Model(tie)
    return split(model, 2, example=EXAMPLE)


WAYS = [carved, at_cut_points, sequential, by_hand, on_meta, without_memory]


@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize("tie", [by_data, transposed, crossing, a_buffer])
def test_memory_of_two_stages_is_refused(make: Callable[..., Stages], tie: Callable[[Any], None]) -> None:
    with pytest.raises(SplitError) as refused:
        make(tie)
    message = str(refused.value)
    assert re.search(r"\b(0\.|layers\.0\.)?(weight|bias) of stage 0\b", message)
    assert re.search(r"\b(weight|bias|first) of stage 1\b", message)
    assert ("is a view of" if tie is a_buffer else "two parameters on the same memory") in message


@pytest.mark.parametrize("tie", [an_attribute, in_a_list])
def test_what_is_not_registered_is_refused(tie: Callable[[Any], None]) -> None:
    with pytest.raises(SplitError, match=r"0\.weight .*1\.first\[0\] of stage 1|1\.first of stage 1 is a view"):
        by_hand(tie)


@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize("share", [one_parameter, within_a_stage, frozen, columns, buffers, normalised])
def test_what_trains_as_the_unsplit_model_is_split(make: Callable[..., Stages], share: Callable[[Any], None]) -> None:
    if share is normalised and make in (on_meta, without_memory):
        pytest.skip("its constructor computes")
    assert len(make(share)) == 2


def test_weights_without_memory_of_their_own_are_left_to_others() -> None:
    layers = [nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    layers[1].weight = nn.Parameter(torch.ones(WIDTH, WIDTH).to_sparse())
    layers[2].bias = nn.Parameter(torch.ones(0))
    assert len(Stages(layers)) == 3
