"""Questions about whole numbers are answered on the meta device; those about activations are not."""

from __future__ import annotations

import pytest
import torch

from rota.profiling.known_numbers import KnownNumbers
from rota.torch_internals import ITEM


def test_numbers_that_follow_from_inputs_and_shapes() -> None:
    known = KnownNumbers()
    with known, torch.device("meta"):
        mask = known.on_meta(torch.tensor([[1, 1, 0], [1, 1, 1]], device="cpu"))
        assert mask.is_meta
        assert not (mask == 1).all()
        assert (mask[:, :2] == 1).all()
        positions = torch.arange(mask.shape[1])[None].expand(2, -1)
        assert int((torch.diff(positions) != 1).sum()) == 0
        assert int(mask.sum()) == 5


def test_a_part_of_longer_rows_is_laid_out_as_its_copy() -> None:
    """Its copy is contiguous, so PyTorch flattens it by a view, which the part itself does not allow."""
    known = KnownNumbers()
    with known:
        targets = known.on_meta(torch.arange(10).reshape(2, 5)[:, 1:])
        assert int(targets.flatten()[4]) == 6
        across = known.on_meta(torch.arange(6).reshape(2, 3).t())
        assert int(across.flatten()[1]) == 3


def test_activations_random_numbers_and_what_was_written_to_are_unknown() -> None:
    known = KnownNumbers()
    with known:
        mask = known.on_meta(torch.ones(3, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="meta"):
            bool(torch.randn(3, device="meta").sum() > 0)
        with pytest.raises(RuntimeError, match="meta"):
            int(torch.randint(3, (), device="meta"))
        assert int(mask[0]) == 1
        mask.fill_(2)
        with pytest.raises(RuntimeError, match="meta"):
            int(mask[0])


def test_the_operation_that_asks_for_a_number() -> None:
    assert ITEM(torch.tensor(3)) == 3
