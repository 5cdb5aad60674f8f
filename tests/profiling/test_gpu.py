"""Profiles of models on a GPU, where there is one."""

from __future__ import annotations

import pytest
import torch

from rota import profile, split
from rota.profiling import profile_layers
from support.layered_models import MAKE, case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and there is none here"),
]


@pytest.mark.parametrize("name", MAKE)
def test_layers_on_a_gpu_add_up_to_its_stages(name: str) -> None:
    of = case(name)
    of.model.cuda()
    batch, target = of.batch.cuda(), of.target.cuda()
    layers = profile_layers(of.model, batch, target, of.loss_fn, optimizer=torch.optim.AdamW, repeats=3)
    assert min(layers.forward_us + layers.backward_us) > 0
    assert torch.cuda.get_device_name() in layers.note
    boundaries = [0, layers.num_layers // 2, layers.num_layers]
    stages = split(of.model, 2, layers.cuts_at(boundaries))
    for split_backward in (False, True):
        added = layers.stages(boundaries, split_backward=split_backward)
        measured = profile(stages, batch, target, of.loss_fn, split_backward=split_backward, repeats=3)
        assert added.activation_bytes == measured.activation_bytes
        assert added.freed_by_input == measured.freed_by_input
        assert min(measured.forward_peak_bytes) > 0
    assert all(parameter.grad is None for parameter in of.model.parameters())
