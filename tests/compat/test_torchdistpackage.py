"""The torchdistpackage door: steps, evaluation and norms equal the unsplit model's; the page's example runs."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rota import PipelineError, SplitError
from rota.compat.torchdistpackage import (
    DDP,
    clip_grad_norm_,
    flatten_model,
    forward_backward,
    forward_eval,
    is_using_pp,
    partition_balanced,
    partition_uniform,
    tpc,
)
from support import pages
from support.pool import Pool, on_ranks

NUM_MICROBATCHES, ROWS, WIDTH = 4, 12, 6
NORM_TYPES = (0.5, 1.0, 2.0, 3.0, float("inf"))


@contextmanager
def groups(**sizes: int) -> Iterator[None]:
    tpc.setup_process_groups([*sizes.items()])
    try:
        yield
        dist.barrier()  # who leaves early would close connections that others are still making
    finally:
        tpc.close()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2 * WIDTH))
        self.more = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)])
        self.double()


def layers() -> list[nn.Module]:
    return flatten_model(Net(), ["first", torch.tanh, "blocks", lambda x: x[:, :WIDTH], "more"], return_list=True)  # type: ignore[return-value]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def serial_gradients() -> tuple[list[float], dict[int, list[Tensor]], nn.Sequential]:
    """Losses of the micro-batches, gradients by layer: of the sum of the losses, which nobody divides."""
    model = nn.Sequential(*layers())
    losses = []
    for x, y in zip(*(value.chunk(NUM_MICROBATCHES) for value in batch()), strict=True):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
    return losses, {i: [p.grad for p in layer.parameters()] for i, layer in enumerate(model)}, model  # type: ignore[misc]


def norms_of(parameters: Callable[[], Any], clip: Callable[..., Any]) -> list[float]:
    return [float(clip(parameters(), 1e9, norm_type)) for norm_type in NORM_TYPES]


def one_pipeline(rank: int, size: int) -> dict[str, Any]:
    """Train with and without a bwd_fn of one's own, evaluate, take norms, clip."""
    with groups(pipe=size):
        assert is_using_pp() == (size > 1)
        mine = partition_uniform(layers()) if rank % 2 else partition_uniform(nn.Sequential(*layers()))
        model = nn.Sequential(*mine)
        x, y = batch()
        seen: list[bool] = []

        def forward(inputs: Any) -> Tensor:
            if not tpc.is_last_in_pipeline_group():
                return model(inputs)
            return nn.functional.mse_loss(model(inputs[0]), inputs[1])

        def backward(output: Tensor, gradient: Tensor | None) -> None:
            seen.append(gradient is None)
            assert output.requires_grad
            torch.autograd.backward(output, gradient)

        given = [x] if tpc.is_first_in_pipeline_group() else None
        if tpc.is_last_in_pipeline_group():
            given = [*(given or []), y]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if [*model.parameters()] else None
        gradients, outputs = [], []
        for bwd_fn in (None, backward):
            outputs.append(forward_backward(optimizer, forward, bwd_fn, given, NUM_MICROBATCHES))
            gradients.append([p.grad.clone() for p in model.parameters()])
        assert not outputs[0].requires_grad
        assert seen == [rank == size - 1] * NUM_MICROBATCHES
        norms = norms_of(model.parameters, clip_grad_norm_)
        assert clip_grad_norm_(iter([*model.parameters()] * 2), 1e9).item() == pytest.approx(norms[2])
        clip_grad_norm_(model.parameters(), 0.5)
        clipped = clip_grad_norm_(model.parameters(), 1e9).item()
        inputs = x if tpc.is_first_in_pipeline_group() else []
        evaluated = forward_backward(None, model, None, inputs, num_microbatches=1, forward_only=True)
        assert torch.equal(evaluated, forward_eval(model, inputs, torch.float16))
        model.zero_grad()
        clip_grad_norm_(model.parameters() if rank else [], 1.0)  # a stage without gradients takes part
        start = rank * (len(layers()) // size)
        by_layer = {start + i: [*layer.parameters()] for i, layer in enumerate(model)}
        sizes = {i: len(parameters) for i, parameters in by_layer.items()}
        return {"gradients": gradients, "sizes": sizes, "outputs": outputs, "norms": norms, "clipped": clipped} | (
            {"evaluated": evaluated} if tpc.is_last_in_pipeline_group() else {}
        )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_steps_evaluation_and_norms(pool: Pool, size: int) -> None:
    losses, gradients, model = serial_gradients()
    by_rank = pool.run(size, one_pipeline, size)
    norms = norms_of(model.parameters, nn.utils.clip_grad_norm_)
    found: set[int] = set()
    for of_rank in by_rank:
        expected = [gradient for i in of_rank["sizes"] for gradient in gradients[i]]
        found |= {*of_rank["sizes"]}
        for its in of_rank["gradients"]:
            torch.testing.assert_close(its, expected, rtol=1e-9, atol=1e-12)
        assert of_rank["norms"] == pytest.approx(norms, rel=1e-9)
        assert of_rank["clipped"] == pytest.approx(0.5, rel=1e-5)
    assert found == {*range(len(model))}
    assert [float(output) for output in by_rank[-1]["outputs"]] == pytest.approx([losses[-1]] * 2, abs=1e-12)
    torch.testing.assert_close(by_rank[-1]["evaluated"], model(batch()[0]).detach(), rtol=1e-9, atol=1e-12)


# --- replicas and parts, whose gradients are averaged once a step -----------------------------------------------------


def replicas_and_parts(rank: int, num_replicas: int, num_parts: int) -> tuple[int, list[Any], float]:
    with groups(data=num_replicas, pipe=2, tensor=num_parts):
        model = DDP(nn.Sequential(*partition_uniform(layers())))
        x, y = (value.chunk(num_replicas)[tpc.get_dp_rank()] for value in batch())

        def forward(inputs: Any) -> Tensor:
            if tpc.is_first_in_pipeline_group():
                return model(inputs)
            return nn.functional.mse_loss(model(inputs[0]), inputs[1])

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = [x] if tpc.is_first_in_pipeline_group() else [y]
        for _ in range(2):  # the second clears what the first has averaged
            forward_backward(optimizer, forward, None, inputs, 2, scatter_gather_tensors=num_parts > 1)
        norm = clip_grad_norm_(model.parameters(), 1e9).item()
        forward_eval(model, x if tpc.is_first_in_pipeline_group() else None)
        return tpc.get_pp_rank(), [p.grad for p in model.parameters()], norm


@pytest.mark.parametrize(("num_replicas", "num_parts"), [(2, 1), (1, 2)])
def test_replicas_and_parts_of_forward_backward(pool: Pool, num_replicas: int, num_parts: int) -> None:
    serial = nn.Sequential(*layers())
    for x, y in zip(*(value.chunk(2 * num_replicas) for value in batch()), strict=True):
        (nn.functional.mse_loss(serial(x), y) / num_replicas).backward()
    whole = [p.grad for p in serial.parameters()]
    norm = nn.utils.get_total_norm(whole).item()
    for stage, gradients, its_norm in pool.run(4, replicas_and_parts, num_replicas, num_parts):
        expected = whole[-len(gradients) :] if stage else whole[: len(gradients)]
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
        assert its_norm == pytest.approx(norm, rel=1e-9)


def layer_of(rank: int) -> nn.Linear:
    torch.manual_seed(rank)
    return nn.Linear(WIDTH, WIDTH).double()


def several_tensors(rank: int) -> list[Any]:
    """Stage 0 sends two floats, flags and numbers; stage 1 one of them in bf16, in a dict; gradients of all three."""
    layer = layer_of(rank)
    x, y = batch()

    def first(value: Tensor) -> tuple[Tensor, ...]:
        made = layer(value)
        return made, made * 2, made > 0, torch.arange(len(value))

    def second(inputs: list[Tensor]) -> dict[str, Tensor]:
        made, other, flags, numbers, extra = inputs
        assert (flags.dtype, numbers.dtype) == (torch.bool, torch.int64)
        assert numbers.tolist() == [*range(len(extra))]
        return {"half": layer(made + extra).to(torch.bfloat16), "whole": other * flags}

    def third(inputs: Any) -> Tensor:
        values, target = inputs
        return ((layer(values["half"].double() + values["whole"]) - target) ** 2).sum()

    with groups(pipe=3):
        forward_backward(None, [first, second, third][rank], None, [x, y * 3, y][rank], NUM_MICROBATCHES)
    return [p.grad for p in layer.parameters()]


def test_several_tensors_over_a_boundary(pool: Pool) -> None:
    layers = [layer_of(rank) for rank in range(3)]
    x, y = batch()
    made = layers[0](x)
    half = layers[1](made + y * 3).to(torch.bfloat16).double()
    ((layers[2](half + made * 2 * (made > 0)) - y) ** 2).sum().backward()
    for layer, gradients in zip(layers, pool.run(3, several_tensors), strict=True):
        # The gradient of a bf16 tensor is rounded to bf16, one by one in whole batch and micro-batches.
        torch.testing.assert_close(gradients, [p.grad for p in layer.parameters()], rtol=1e-9, atol=1e-9)


def writing(rank: int) -> list[Any]:
    """A stage may begin by writing into what it receives; a backward of one's own may run in parts."""
    layer = layer_of(rank)
    x, y = batch()

    def forward(inputs: Any) -> Tensor:
        if rank == 0:
            return layer(inputs)
        return ((layer(torch.relu_(inputs[0])) - inputs[1]) ** 2).sum()

    def in_parts(output: Tensor, gradient: Tensor | None) -> None:
        (output * 0.25).backward(gradient, retain_graph=True)
        (output * 0.75).backward(gradient)

    with groups(pipe=2):
        forward_backward(None, forward, in_parts, [x, y][rank], NUM_MICROBATCHES)
        gradients = [p.grad.clone() for p in layer.parameters()]  # type: ignore[union-attr]
        layer.requires_grad_(rank != 0)
        forward_backward(None, forward, None, [x, y][rank], NUM_MICROBATCHES)  # behind a frozen stage
        torch.testing.assert_close([p.grad for p in layer.parameters()], [g * (1 + rank) for g in gradients])
    return gradients


def test_writing_into_what_arrives(pool: Pool) -> None:
    layers = [layer_of(rank) for rank in range(2)]
    x, y = batch()
    ((layers[1](torch.relu(layers[0](x))) - y) ** 2).sum().backward()
    for layer, gradients in zip(layers, pool.run(2, writing), strict=True):
        torch.testing.assert_close(gradients, [p.grad for p in layer.parameters()], rtol=1e-9, atol=1e-12)


@on_ranks(4)
def test_topology(rank: int) -> None:
    with pytest.raises(PipelineError, match="there are no process groups; call tpc"):
        tpc.get_group("pipe")
    with groups(data=2, pipe=2):
        assert [tpc.get_ranks_in_group(mode) for mode in ("data", "pipe", "tensor", "model")] == [
            [rank % 2, rank % 2 + 2],
            [rank // 2 * 2, rank // 2 * 2 + 1],
            [rank],
            [rank // 2 * 2, rank // 2 * 2 + 1],
        ]
        own_ranks = tpc.get_dp_rank(), tpc.get_pp_rank(), tpc.get_tp_rank(), tpc.get_mp_rank()
        assert own_ranks == (rank // 2, rank % 2, 0, rank % 2)
        assert tpc.get_prev_global_rank() == tpc.get_next_global_rank() == rank // 2 * 2 + (rank + 1) % 2
        assert (tpc.is_first_in_data_group(), tpc.is_last_in_data_group()) == (rank < 2, rank >= 2)
        assert (tpc.is_first_in_pipeline_group(), tpc.is_last_in_pipeline_group()) == (rank % 2 == 0, rank % 2 == 1)
        total = torch.tensor([rank])
        dist.all_reduce(total, group=tpc.get_group("data"))
        assert total.item() == rank % 2 * 2 + 2
        with pytest.raises(PipelineError, match="there is no mode 'moe'; ask for one of 'data', 'pipe'"):
            tpc.get_group("moe")
    with groups(pipe=2, tensor=2):
        assert tpc.get_ranks_in_group("tensor") == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert tpc.get_next_global_rank("pipe") == (rank + 2) % 4
        assert tpc.get_ranks_in_group("model") == [0, 1, 2, 3]
    for config, told in (
        ([("pipe", 3)], "{'pipe': 3} is for 3 processes, but 4 were started; start 3"),
        ([("pipe", 2), ("expert", 2)], "config has the modes 'pipe', 'expert'; give 'data', 'pipe' and 'tensor'"),
    ):
        with pytest.raises(PipelineError, match=re.escape(told)):
            tpc.setup_process_groups(config)


@on_ranks(3)
def test_cuts_and_refusals(rank: int) -> None:
    with groups(pipe=3):
        sizes = [nn.Linear(size, 1, bias=False) for size in (9, 1, 1, 5, 5, 8)]
        balanced = [layer.in_features for layer in partition_balanced([*sizes], None)]
        assert balanced == [[9, 1, 1], [5, 5], [8]][rank]
        uniform = [layer.in_features for layer in partition_uniform(sizes[:5], extra_len=1)]
        assert uniform == [[9, 1], [1, 5], [5]][rank]
        for inputs, told in (
            (torch.zeros(10, 2), r"inputs\[0\] is of shape \[10, 2\], which does not divide along dim 0 into 4"),
            ([torch.zeros(4), torch.zeros(())], r"inputs\[1\] is of shape \[\], which does not divide"),
        ):
            with pytest.raises(PipelineError, match=told):
                forward_backward(None, lambda value: value, None, inputs, NUM_MICROBATCHES)
        if rank == 0:
            for inputs in (None, []):
                with pytest.raises(PipelineError, match="inputs is empty on the first stage"):
                    forward_backward(None, lambda value: value, None, inputs)


def test_flattening() -> None:
    model = Net()
    flat = flatten_model(model, ["first", model.blocks, "blocks.0", "more", torch.tanh])
    assert isinstance(flat, nn.Sequential)
    assert [*flat][:5] == [model.first, model.blocks, model.blocks[0], *model.more]
    assert torch.equal(flat[5](torch.ones(1)), torch.tanh(torch.ones(1)))
    for layer, told in (
        ("second", "layer_list[0] is 'second', but Net has no such layer"),
        (3, "layer_list[0] is 3: give"),
    ):
        with pytest.raises(SplitError, match=re.escape(told)):
            flatten_model(model, [layer])  # type: ignore[list-item]


def run_example(rank: int) -> float:
    names: dict[str, Any] = {}
    pages.run("coming-from-earlier-systems.md#TorchDistPackage", 0, names)
    tpc.close()
    return names["norm"].item()


def test_the_example_of_the_docs(pool: Pool) -> None:
    one, other = pool.run(2, run_example)
    assert one == other > 0
