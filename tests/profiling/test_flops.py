"""Floating-point operations of estimates: every layout and operator against plain products of the same size."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import flop_registry, register_flop_formula

from rota import LayerCosts, PlacementError
from rota.profiling import DEVICES
from rota.profiling.roofline import Roofline
from support.profiles import profile_layers

H100 = DEVICES["h100"]
Tensor = torch.Tensor


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, trained: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained)


def flops(forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Of a forward and of its backward; none of the operators is one whose operations are unknown."""
    clock = Roofline(H100)
    with clock:
        out = forward()
        first = clock.num_flops
        if out.requires_grad:
            out.backward(torch.empty_like(out))
    assert clock.take_uncounted() == ()
    return first, clock.num_flops - first


# Groups of 16 rows or columns each, so that batched products of the same size exist.
GROUPS, M, K, N = 4, 16, 32, 64
GROUPED = {
    "rows by group": ((GROUPS * M, K), (GROUPS, K, N)),
    "columns by group": ((GROUPS, M, K), (K, GROUPS * N)),
    "batches": ((GROUPS, M, K), (GROUPS, K, N)),
    "inner dimension by group": ((M, GROUPS * K), (GROUPS * K, N)),
}


@pytest.mark.parametrize("name", GROUPED)
def test_a_grouped_product_counts_as_one_by_one(name: str) -> None:
    a, b = (meta(*shape) for shape in GROUPED[name])
    offs = None if name == "batches" else torch.empty(GROUPS, dtype=torch.int32, device="meta")
    grouped = flops(lambda: functional.grouped_mm(a, b, offs=offs))
    batched = flops(lambda: torch.bmm(meta(GROUPS, M, K), meta(GROUPS, K, N)))
    one_by_one = flops(lambda: torch.stack([meta(M, K) @ meta(K, N) for _ in range(GROUPS)]))
    assert grouped == batched == one_by_one == (2 * GROUPS * M * K * N, 4 * GROUPS * M * K * N)


def test_products_of_few_bits_count_at_their_own_speed() -> None:
    size = 4096
    a, b = (meta(size, size, dtype=torch.float8_e4m3fn, trained=False) for _ in range(2))
    int8 = meta(size, size, dtype=torch.int8, trained=False)
    one, wide = meta(dtype=torch.float32, trained=False), meta(size, size, trained=False)
    us = {}
    for name, product in {
        "float8": lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16),
        "int8": lambda: torch._int_mm(int8, int8),
        "bfloat16": lambda: wide @ wide,
    }.items():
        with Roofline(H100) as clock:
            product()
        assert clock.num_flops == 2 * size**3
        us[name] = clock.us
    assert us["float8"] == us["int8"] == pytest.approx(us["bfloat16"] * 989 / 1979)
    a100 = DEVICES["a100-80gb"]
    assert a100.op_us(10**12, 1, torch.float8_e5m2) == a100.op_us(10**12, 1, torch.bfloat16)
    assert H100.op_us(10**12, 1, torch.complex64) == H100.op_us(10**12, 1, torch.float32)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_counts_in_every_decomposition(bias: bool) -> None:
    layer = nn.Linear(16, 32, bias=bias, device="meta")
    forward = 2 * 3 * 5 * 16 * 32
    for shape in ((15, 16), (3, 5, 16)):
        assert flops(lambda shape=shape: layer(meta(*shape, dtype=torch.float32))) == (forward, 2 * forward)
    strided = meta(5, 3, 16, dtype=torch.float32).transpose(0, 1)
    assert flops(lambda: layer(strided)) == (forward, 2 * forward)


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_backward_of_a_convolution_takes_twice_the_forward(groups: int, transposed: bool) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(8, 16, 3, stride=2, groups=groups, device="meta")
    x = meta(2, 8, 9, 9, dtype=torch.float32)
    forward, backward = flops(lambda: layer(x))
    places = 81 if transposed else 16
    assert forward == 2 * 2 * places * 9 * 8 * 16 // groups
    assert backward == 2 * forward


@contextmanager
def own_operator() -> Iterator[Any]:
    """An operator `rota_test::scan` with a backward, which exists only inside the context."""
    library = torch.library.Library("rota_test", "FRAGMENT")
    try:
        library.define("scan(Tensor x) -> Tensor")
        library.impl("scan", torch.empty_like, "Meta")
        library.impl("scan", lambda x: x.clone(), "CPU")
        torch.library.register_autograd("rota_test::scan", lambda context, gradient: gradient * 2, lib=library)
        yield torch.ops.rota_test.scan
    finally:
        flop_registry.pop(torch.ops.rota_test.scan, None)
        library._destroy()


def test_an_operator_with_unknown_operations_is_named_with_its_layer() -> None:
    class Scan(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.ops.rota_test.scan(x)
            return y.sigmoid()

    model = nn.Sequential(nn.Linear(8, 8), Scan(), nn.GELU(), Scan())
    with own_operator() as scan:
        with pytest.warns(UserWarning, match=r"only the bytes .* count: rota_test::scan in layers 2 \(1\), 4 \(3\)\. "):
            layers = profile_layers(model, torch.zeros(4, 8), device="h100")
        assert layers.uncounted == ((1, "rota_test::scan"), (3, "rota_test::scan"))
        assert LayerCosts.from_json(layers.to_json()) == layers
        register_flop_formula(scan)(lambda x, **_: 10**12)
        counted = profile_layers(model, torch.zeros(4, 8), device="h100")  # a warning would be an error
        assert counted.forward_us[1] >= 10**6 * 10**12 // int(H100.flops_per_s["float32"])
        assert (counted.uncounted, counted.why_incomplete) == ((), "")
        assert "uncounted" not in counted.to_json()
    with pytest.raises(PlacementError, match="uncounted has 'rota_test::scan' in layer 4, and there are 4"):
        replace(layers, uncounted=((4, "rota_test::scan"),))


def test_pytorch_s_own_operators_are_named_only_if_they_compute_much() -> None:
    x = meta(64, 64, dtype=torch.float32, trained=False)
    with Roofline(H100) as clock:
        torch.linalg.svd(x)
        torch.cdist(x, x, p=1.0)
    assert {*clock.take_uncounted()} == {"aten::_linalg_svd", "aten::_cdist_forward"}
    with Roofline(H100) as clock:
        y = functional.gelu(x).softmax(-1).sort().values.cumsum(0) + x.t().contiguous()
        functional.layer_norm(functional.interpolate(y[None, None], scale_factor=2.0, mode="bilinear"), (128,))
        torch.fft.fft(x)
        x[torch.empty(5, dtype=torch.int64, device="meta")].topk(3)
    assert clock.take_uncounted() == ()
