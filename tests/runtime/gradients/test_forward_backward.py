"""A stage cut off at its boundaries gives the gradients of the whole, and keeps no more than it must."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rota.models import Stages
from rota.runtime.gradients.forward_backward import backward, forward, keep_loss


def test_outputs_are_held_by_their_gradient_edges_alone() -> None:
    stages = Stages([nn.Linear(3, 4).double(), nn.Linear(4, 2).double()])
    output, values, kept = forward(stages, 0, [], torch.randn(5, 3).double())
    storage = StorageWeakRef(output.untyped_storage())
    assert len(kept.outputs[0]) == 1
    del output, values
    assert storage.expired()


def test_a_sparse_value_between_stages_of_one_rank() -> None:
    weight = nn.Parameter(torch.randn(4, 2, dtype=torch.float64))

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(x, self.weight)

    stages = Stages([nn.Identity(), Product()])
    dense = torch.tensor([[0, 1.5, 0, 2], [3, 0, 0, 0]], dtype=torch.float64)
    leaf = dense.to_sparse().requires_grad_()
    output, _, kept = forward(stages, 1, [leaf], None)
    keep_loss(kept, output.square().sum(), 1.0)
    ((gradient,),) = backward(kept, [])
    expected = dense.clone().requires_grad_()
    torch.autograd.backward((expected @ weight.detach()).square().sum())
    there = dense != 0
    torch.testing.assert_close(gradient.to_dense()[there], expected.grad[there], rtol=1e-12, atol=1e-12)
    assert leaf._version == 0
