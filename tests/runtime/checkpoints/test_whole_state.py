"""What a commit or a checkpoint holds is all that the next step needs, or it is refused before any training is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from rota import Checkpoints, Stages, split
from rota.core.reading import LARGEST
from rota.runtime.checkpoints.values import DTYPES
from support.checkpoint_runs import TWO, Run, Training, batch, memory, model, steps_in
from support.networks import refusal
from support.pool import on_ranks


def first_layer(training: Training) -> Any:
    """Of those on this rank."""
    return next(iter(training.pipeline.local_stages.values()))[0]


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)  # as FSDP frees gathered weights
    return tensor


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "of torch.complex128; use one of int8": lambda: torch.zeros(4, dtype=torch.complex128),
    "of torch.int4; use one of int8": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.int4),
    "whose layout is torch.sparse_coo; make it dense": lambda: torch.eye(3).to_sparse(),
    "is expanded, so that several elements are one number": lambda: torch.zeros(1).expand(3),
    "was freed, so it has no values": freed,
}


@on_ranks(2)
def test_a_tensor_that_could_not_be_restored_is_refused_at_the_first_commit(rank: int, tmp_path: Path) -> None:
    for words, make in ODD.items():
        with memory() as file:
            training = Training(TWO)
            first_layer(training).register_buffer("odd", make())
            with training.pipeline:
                checkpoints = training.checkpoints(tmp_path)
                training.steps(range(1))
                for act in (checkpoints.commit, checkpoints.save):
                    told = refusal(lambda: act(1))  # noqa: B023
                    assert words in told
                    assert ".odd" in told
                assert steps_in(file) == []


def any_bytes(dtype: torch.dtype) -> torch.Tensor:
    """Two rows of all bytes, which are valid values of all dtypes but bool."""
    data = torch.arange(512).to(torch.uint8)
    return (data % 2 if dtype is torch.bool else data).view(dtype).view(2, -1)


@on_ranks(2)
def test_every_dtype_is_restored_to_the_bit(rank: int, tmp_path: Path) -> None:
    def made(values: Callable[[torch.dtype], torch.Tensor]) -> Training:
        training = Training(TWO)
        for layer in (stage[0] for stage in training.stages.modules):
            for name, dtype in DTYPES.items():
                layer.register_buffer(f"of_{name}", values(dtype))
                layer.register_buffer(f"of_{name}_transposed", values(dtype).t())
        return training

    with memory():
        with made(any_bytes) as before:
            kept = before.checkpoints(tmp_path)
            kept.commit(1)
            kept.save(0)
        for step in (None, 0):
            with made(lambda dtype: torch.zeros(512, dtype=torch.uint8).view(dtype).view(2, -1)) as after:
                found = after.checkpoints(tmp_path).load(step)
                assert (found.path is None) is (step is None)
                for name, dtype in DTYPES.items():
                    values = first_layer(after).get_buffer(f"of_{name}")
                    transposed = first_layer(after).get_buffer(f"of_{name}_transposed").t()
                    for one in (values, transposed):
                        assert torch.equal(one.view(torch.uint8), any_bytes(dtype).view(torch.uint8)), name


@on_ranks(2)
def test_a_shard_of_another_size_is_refused(rank: int, tmp_path: Path) -> None:
    run = Run("1f1b", 1, 2)
    with memory():
        stages = split(model(), 1)
        fully_shard(stages[0], mesh=run.mesh()["dp"])
        with Training(run, stages) as training:
            kept = training.checkpoints(tmp_path)
            training.steps(range(1))
            for parameter, state in training.optimizer.state.items():
                state["exp_avg"] = torch.ones(parameter.shape, dtype=torch.float64)  # whole, and no DTensor
            kept.commit(1)
            assert "shard the model and the optimizer's state alike" in refusal(kept.load)


@on_ranks(2, renewed=True)
def test_gradients_that_fsdp_keeps_are_refused(rank: int, tmp_path: Path) -> None:
    run = Run("1f1b", 1, 2)
    with memory() as file:
        stages = split(model(), 1)
        fully_shard(stages[0], mesh=run.mesh()["dp"])
        training = Training(run, stages)
        with training.pipeline as pipeline:
            kept = training.checkpoints(tmp_path)
            training.steps(range(1))
            kept.commit(1)
            mine = [part.chunk(2)[pipeline.replica] for part in batch(1)]
            pipeline.step(*mine, scale=0.5, sync=False)
            training.optimizer.zero_grad()  # does not clear what FSDP keeps
            told = "0.linear.weight has a gradient of a step with sync=False, which FSDP keeps until a step with"
            assert told in refusal(lambda: kept.commit(2))
            assert steps_in(file) == [1]
            pipeline.step(*mine, scale=0.5)
            training.optimizer.step()
            training.optimizer.zero_grad()
            kept.commit(2)
            assert sorted(steps_in(file)) == [1, 2]


class Averaging(nn.Module):
    """With a buffer that each forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(self.linear(x)) + x - self.mean


def averaging() -> Stages:
    torch.manual_seed(0)
    return Stages([Averaging().double() for _ in range(2)])


@on_ranks(2)
def test_a_buffer_that_a_forward_replaces_is_kept_as_it_is_now(rank: int, tmp_path: Path) -> None:
    with memory():
        with Training(TWO, averaging()) as first:
            kept = first.checkpoints(tmp_path)
            first.steps(range(2))
            kept.save(2)
            kept.commit(2)
            expected = first.steps(range(2, 5))
            assert kept.load(2) is not None  # into the tensors that the modules have now
            assert first.steps(range(2, 5)) == expected
            kept.load(2)
            kept.commit(3)
        for step in (None, 2):
            with Training(TWO, averaging()) as again:
                assert again.checkpoints(tmp_path).load(step) is not None
                assert again.steps(range(2, 5)) == expected


@on_ranks(2)
def test_a_buffer_that_would_be_lost_is_refused(rank: int, tmp_path: Path) -> None:
    with memory():
        for change, told in (
            ("late", "late of a Averaging is newer than the Checkpoints"),
            ("untied", "was one tensor in 2 modules, and is not any more"),
        ):
            stages = averaging()
            for stage in stages.modules:
                stage.twin = Averaging().double()
                stage.twin.mean = stage.mean
            with Training(TWO, stages) as training:
                kept = training.checkpoints(tmp_path)
                if change == "late":
                    stages[rank].late = torch.ones(3)
                else:
                    stages[rank].mean = torch.ones(6)
                assert told in refusal(kept.commit, 1)
                assert told in refusal(kept.save, 1)


@on_ranks(2)
def test_state_that_could_not_be_read_again_is_refused(rank: int, tmp_path: Path) -> None:
    told = []
    with memory() as file, Training(TWO) as training:
        kept = training.checkpoints(tmp_path)
        training.steps(range(1))
        weight = next(training.pipeline.parameters())
        training.optimizer.state["num_steps"] = 3  # type: ignore[index]
        told += [refusal(lambda: kept.commit(1)), refusal(lambda: kept.save(1))]
        del training.optimizer.state["num_steps"]  # type: ignore[arg-type]
        for name in (0, "a\nb"):
            training.optimizer.state[weight][name] = torch.zeros(())
            told += [refusal(lambda: kept.commit(1)), refusal(lambda: kept.save(1))]
            del training.optimizer.state[weight][name]
        told += [refusal(lambda: kept.commit(LARGEST + 1)), refusal(lambda: kept.save(LARGEST + 1))]
        assert steps_in(file) == []
        kept.commit(LARGEST)
        found = kept.load()
        assert found.step == LARGEST
    expected = ('the key "num_steps", which is not a weight', "has the key 0; use a string", '"a\\nb"', "step=")
    for position, words in enumerate(expected):
        assert all(words in one for one in told[2 * position : 2 * position + 2]), told


class Passing(torch.optim.Optimizer):
    """Around another optimizer, whose state it shows."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults, self.param_groups = inner, inner.defaults, inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state


class Slow(torch.optim.SGD):
    """With another optimizer in a list."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"])
        self.fast = [inner]


@on_ranks(2, renewed=True)
def test_an_optimizer_that_keeps_its_state_in_another_one_is_refused(rank: int, tmp_path: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what it imports

    run = Run("1f1b", 1, 2)
    training = Training(run)
    with training.pipeline as pipeline:
        adam, group = training.optimizer, run.mesh()["dp"].get_group()
        zero = ZeroRedundancyOptimizer(pipeline.parameters(), torch.optim.AdamW, process_group=group)
        for other, words in ((zero, "a ZeroRedundancyOptimizer, keeps"), (Slow(adam), "a Slow, keeps")):
            told = refusal(Checkpoints, tmp_path, pipeline, other)
            assert words in told
            assert "in another one, a AdamW (" in told
        training.steps(range(1))
        kept = Checkpoints(tmp_path, pipeline, Passing(adam))
        kept.save(1)
        before = adam.state[next(pipeline.parameters())]["exp_avg"].clone()
        training.steps(range(1, 2))
        assert kept.load() is not None
        assert torch.equal(adam.state[next(pipeline.parameters())]["exp_avg"], before)


@on_ranks(2)
def test_weights_of_a_step_that_is_refused_are_not_kept(rank: int, tmp_path: Path) -> None:
    with memory() as file:
        training = Training(TWO)
        with training.pipeline as pipeline:
            kept = training.checkpoints(tmp_path)
            training.steps(range(1))
            kept.commit(1)
            x, target = batch(1)
            pipeline.begin_step(x.fill_(torch.nan), target)
            training.optimizer.step()
            training.optimizer.zero_grad()
            assert "the mean loss is nan" in refusal(lambda: kept.commit(2))
            assert steps_in(file) == [1]
