"""Forwards that need data cannot be estimated: one line says which module, what it does, where, and what to do."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rota import Stages
from rota.core.errors import EstimateError, PipelineError
from support.profiles import profile_layers

Tensor = torch.Tensor

REASONS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "nonzero": (lambda x: x.nonzero(), "shape of what aten::nonzero makes depends on data"),
    "mask": (lambda x: x[x > 0], "shape of what aten::index"),
    "repeat": (lambda x: x.repeat_interleave(x.argmax(-1), 0), "depends on data"),
    "branch": (lambda x: 1 if x.sum() > 0 else 2, r"asks for a number that depends on data \(aten::"),
    "list": (lambda x: x.argmax(-1).tolist(), "cannot be estimated, because"),
    "numpy": (lambda x: x.detach().numpy(), "cannot be estimated, because"),
}


class Needs(nn.Module):
    def __init__(self, how: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        self.how(x)
        return x


class Block(nn.Module):
    def __init__(self, how: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(4), Needs(how)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(self.norm(x))
        return y


class Model(nn.Module):
    def __init__(self, how: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(lambda x: None), Block(how), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("name", REASONS)
def test_what_needs_data_is_named_with_its_module_place_and_remedy(name: str) -> None:
    how, reason = REASONS[name]
    with torch.device("meta"):  # cut by shapes
        cut_by_shapes = Model(how)
    made_by_hand = nn.Sequential(nn.Linear(4, 4), Block(how))
    for model, where in (
        (cut_by_shapes, r"(layer 2 of 3 \(layers\.1\): )?layers\.1\.moe: "),
        (made_by_hand, r"layer 2 of 2 \(1\): 1\.moe: "),
    ):
        with pytest.raises(EstimateError, match=f"^{where}it cannot be estimated, .*{reason}") as caught:
            profile_layers(model, torch.zeros(3, 4), device="h100")
        text = str(caught.value)
        assert "\n" not in text
        assert "measure on the device itself" in text
        assert re.search(r"test_missing_data\.py:\d+ \(", text)


def test_what_follows_from_the_batch_alone_is_known() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            positions = torch.arange(ids.shape[1], device=self.embed.weight.device)
            assert int(positions[-1]) == ids.shape[1] - 1
            x = self.embed(ids)
            return x if (mask == 1).all() else x * mask[..., None]

    with torch.device("meta"):
        model = Masked()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert (
        profile_layers(Stages([model], inputs=[(0, 1)]), (torch.ones_like(mask), mask), device="h100").num_layers == 1
    )


def test_an_operator_without_shapes_is_told_to_register_them() -> None:
    library = torch.library.Library("rota_test", "FRAGMENT")
    try:
        library.define("opaque(Tensor x) -> Tensor")
        library.impl("opaque", lambda x: x.clone(), "CPU")
        with pytest.raises(EstimateError, match=r"run rota_test::opaque without data, at .*library\.register_fake"):
            profile_layers(nn.Sequential(Block(torch.ops.rota_test.opaque)), torch.zeros(3, 4), device="h100")
    finally:
        library._destroy()


def test_other_errors_stay_what_they_are() -> None:
    def refuse(_: Tensor) -> None:
        raise NotImplementedError("only for pairs")

    with pytest.raises(PipelineError, match="failed while profiling: NotImplementedError: only for pairs") as caught:
        profile_layers(nn.Sequential(Block(refuse)), torch.zeros(3, 4), device="h100")
    assert not isinstance(caught.value, EstimateError)
    with torch.device("meta"):
        model = Model(refuse)
    with pytest.raises(NotImplementedError, match="only for pairs"):
        profile_layers(model, torch.zeros(3, 4), device="h100")
