"""Profiles of models on a GPU, where there is one."""

from collections.abc import Callable

import pytest
import torch

from rota import split
from rota.profiling.clocks import DeviceClock, Spinner
from rota.runtime.device.streams import StreamDevice
from support.layered_models import MAKE, case
from support.profiles import profile, profile_layers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and there is none here")


def test_kernels_spin_for_as_long_as_asked() -> None:
    device = StreamDevice(torch.device("cuda", 0))
    spinner = Spinner(device)
    for us in (200, 5_000):
        device.begin()
        spinner.spin(1_000)
        marks = [device.mark()]
        spinner.spin(us)
        marks.append(device.mark())
        start_ns, end_ns = device.times_ns(marks)
        assert (end_ns - start_ns) / 1000 == pytest.approx(us, rel=0.1)


def test_times_do_not_contain_launches() -> None:
    x = torch.zeros(1, device="cuda")

    def run(mark: Callable[[], None]) -> None:
        mark()
        for _ in range(50):
            x.add_(1)
        mark()

    laps = DeviceClock(StreamDevice(torch.device("cuda", 0))).timed(run, 5, 0, together=True)
    assert laps.starved == [False]
    assert laps.us[0] < laps.host_us[0]  # the host takes longer for such small kernels


@pytest.mark.parametrize("name", MAKE)
def test_layers_on_a_gpu_add_up_to_its_stages(name: str) -> None:
    of = case(name)
    of.model.cuda()
    batch, target = of.batch.cuda(), of.target.cuda()
    layers = profile_layers(of.model, batch, target, of.loss_fn, optimizer=torch.optim.AdamW, repeats=3)
    assert min(layers.forward_us + layers.backward_us) > 0
    assert torch.cuda.get_device_name() in layers.note
    boundaries = [0, layers.num_layers // 2, layers.num_layers]
    stages = split(of.model, 2, layers.cuts_at(boundaries), example=of.batch)
    for split_backward in (False, True):
        added = layers.stages(boundaries, split_backward=split_backward)
        measured = profile(stages, batch, target, of.loss_fn, split_backward=split_backward, repeats=3)
        assert added.activation_bytes == measured.activation_bytes
        assert added.freed_by_input == measured.freed_by_input
        assert min(measured.forward_peak_bytes) > 0
    assert all(parameter.grad is None for parameter in of.model.parameters())
