"""A stage cut off at its boundaries gives the gradients of the whole, and keeps no more than it must."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rota.models import Stages
from rota.runtime.gradients.forward_backward import backward, forward, keep_loss
from rota.runtime.messages import hand_over


def two_stages() -> Stages:
    torch.manual_seed(0)
    return Stages([nn.Linear(3, 4).double(), nn.Linear(4, 2).double()])


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def test_two_stages_by_hand() -> None:
    stages, x, target = two_stages(), torch.randn(5, 3).double(), torch.randn(5, 2).double()
    loss = mean_square(stages.run(x), target)
    loss.backward()
    expected = [parameter.grad for _, parameter in stages.named_parameters()]
    for module in stages.modules:
        module.zero_grad(set_to_none=True)

    _, (value,), first = forward(stages, 0, [], x)
    leaf = hand_over(value)
    output, values, second = forward(stages, 1, [leaf], x)
    assert values == []
    keep_loss(second, mean_square(output, target), 0.25)
    (gradients,) = backward(second, [])
    assert backward(first, [gradients]) == []
    for (_, parameter), gradient in zip(stages.named_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 4, rtol=1e-12, atol=1e-12)


def test_outputs_are_held_by_their_gradient_edges_alone() -> None:
    stages = two_stages()
    output, values, kept = forward(stages, 0, [], torch.randn(5, 3).double())
    storage = StorageWeakRef(output.untyped_storage())
    assert len(kept.outputs[0]) == 1
    del output, values
    assert storage.expired()


def test_what_does_not_reach_the_loss_has_no_gradient() -> None:
    class Second(nn.Module):
        def forward(self, pair: Any) -> Tensor:
            return pair[1] * 2

    stages = Stages([nn.Identity(), Second()])
    leaves = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    output, _, kept = forward(stages, 1, [tuple(leaves)], None)
    keep_loss(kept, output.sum(), 1.0)
    (gradients,) = backward(kept, [])
    assert gradients[0] is None
    assert gradients[1].tolist() == [2, 2, 2]


def test_nothing_to_differentiate() -> None:
    stages = two_stages()
    for module in stages.modules:
        module.requires_grad_(False)
    output, _, kept = forward(stages, 1, [torch.randn(5, 4).double()], None)
    keep_loss(kept, mean_square(output, torch.zeros(5, 2)), 1.0)
    assert kept.losses == []
    assert backward(kept, []) == [[]]


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


def test_hand_over_shares_memory_and_cuts_the_graph() -> None:
    x = torch.randn(3, requires_grad=True)
    value = {"a": [x * 2, None, torch.Size([1])], 3: (x.detach(), torch.tensor([1, 2]), "text")}
    copy = hand_over(value)
    made, size = copy["a"][0], copy["a"][2]
    assert made.is_leaf
    assert made.requires_grad
    assert made.data_ptr() == value["a"][0].data_ptr()
    assert type(size) is torch.Size
    assert [t.requires_grad for t in copy[3][:2]] == [False, False]
    assert copy[3][2] == "text"
