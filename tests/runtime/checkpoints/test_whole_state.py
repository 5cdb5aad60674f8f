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
from support.pool import Pool


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


def refuse_tensors(rank: int, folder: Path) -> None:
    for words, make in ODD.items():
        with memory() as file:
            training = Training(TWO)
            first_layer(training).register_buffer("odd", make())
            with training.pipeline:
                checkpoints = training.checkpoints(folder)
                training.steps(range(1))
                for act in (checkpoints.commit, checkpoints.save):
                    told = refusal(lambda: act(1))  # noqa: B023
                    assert words in told
                    assert ".odd" in told
                assert steps_in(file) == []


def test_a_tensor_that_could_not_be_restored_is_refused_at_the_first_commit(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, refuse_tensors, tmp_path)


def any_bytes(dtype: torch.dtype) -> torch.Tensor:
    """Two rows of all bytes, which are valid values of all dtypes but bool."""
    data = torch.arange(512).to(torch.uint8)
    return (data % 2 if dtype is torch.bool else data).view(dtype).view(2, -1)


def restore_dtypes(rank: int, folder: Path) -> None:
    def made(values: Callable[[torch.dtype], torch.Tensor]) -> Training:
        training = Training(TWO)
        for layer in (stage[0] for stage in training.stages.modules):
            for name, dtype in DTYPES.items():
                layer.register_buffer(f"of_{name}", values(dtype))
                layer.register_buffer(f"of_{name}_transposed", values(dtype).t())
        return training

    with memory():
        before = made(any_bytes)
        with before.pipeline:
            kept = before.checkpoints(folder)
            kept.commit(1)
            kept.save(0)
        for step in (None, 0):
            after = made(lambda dtype: torch.zeros(512, dtype=torch.uint8).view(dtype).view(2, -1))
            with after.pipeline:
                found = after.checkpoints(folder).load(step)
                assert (found.path is None) is (step is None)
                for name, dtype in DTYPES.items():
                    values = first_layer(after).get_buffer(f"of_{name}")
                    transposed = first_layer(after).get_buffer(f"of_{name}_transposed").t()
                    for one in (values, transposed):
                        assert torch.equal(one.view(torch.uint8), any_bytes(dtype).view(torch.uint8)), name


def test_every_dtype_is_restored_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, restore_dtypes, tmp_path)


def shard_otherwise(rank: int, folder: Path) -> str:
    run = Run("1f1b", 1, 2)
    with memory():
        stages = split(model(), 1)
        fully_shard(stages[0], mesh=run.mesh()["dp"])
        training = Training(run, stages)
        with training.pipeline:
            kept = training.checkpoints(folder)
            training.steps(range(1))
            for parameter, state in training.optimizer.state.items():
                state["exp_avg"] = torch.ones(parameter.shape, dtype=torch.float64)  # whole, and no DTensor
            kept.commit(1)
            return refusal(kept.load)


def test_a_shard_of_another_size_is_refused(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(2, shard_otherwise, tmp_path):
        assert "shard the model and the optimizer's state alike" in told


def keep_gradients_in_fsdp(rank: int, folder: Path) -> str:
    run = Run("1f1b", 1, 2)
    with memory() as file:
        stages = split(model(), 1)
        fully_shard(stages[0], mesh=run.mesh()["dp"])
        training = Training(run, stages)
        with training.pipeline as pipeline:
            kept = training.checkpoints(folder)
            training.steps(range(1))
            kept.commit(1)
            mine = [part.chunk(2)[pipeline.replica] for part in batch(1)]
            pipeline.step(*mine, scale=0.5, sync=False)
            training.optimizer.zero_grad()  # does not clear what FSDP keeps
            told = refusal(lambda: kept.commit(2))
            assert steps_in(file) == [1]
            pipeline.step(*mine, scale=0.5)
            training.optimizer.step()
            training.optimizer.zero_grad()
            kept.commit(2)
            assert sorted(steps_in(file)) == [1, 2]
            return told


def test_gradients_that_fsdp_keeps_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.renew()
    for told in pool.run(2, keep_gradients_in_fsdp, tmp_path):
        assert "0.linear.weight has a gradient of a step with sync=False, which FSDP keeps until a step with" in told


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


def replace_buffers(rank: int, folder: Path) -> None:
    with memory():
        first = Training(TWO, averaging())
        with first.pipeline:
            kept = first.checkpoints(folder)
            first.steps(range(2))
            kept.save(2)
            kept.commit(2)
            expected = first.steps(range(2, 5))
            assert kept.load(2) is not None  # into the tensors that the modules have now
            assert first.steps(range(2, 5)) == expected
            kept.load(2)
            kept.commit(3)
        for step in (None, 2):
            again = Training(TWO, averaging())
            with again.pipeline:
                assert again.checkpoints(folder).load(step) is not None
                assert again.steps(range(2, 5)) == expected


def test_a_buffer_that_a_forward_replaces_is_kept_as_it_is_now(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, replace_buffers, tmp_path)


def refuse_buffers(rank: int, folder: Path) -> list[list[str]]:
    told = []
    with memory():
        for change in ("late", "untied"):
            stages = averaging()
            for stage in stages.modules:
                stage.twin = Averaging().double()
                stage.twin.mean = stage.mean
            training = Training(TWO, stages)
            with training.pipeline:
                kept = training.checkpoints(folder)
                if change == "late":
                    stages[rank].late = torch.ones(3)
                else:
                    stages[rank].mean = torch.ones(6)
                told.append([refusal(lambda: kept.commit(1)), refusal(lambda: kept.save(1))])  # noqa: B023
    return told


def test_a_buffer_that_would_be_lost_is_refused(pool: Pool, tmp_path: Path) -> None:
    for late, untied in pool.run(2, refuse_buffers, tmp_path):
        assert all("late of a Averaging is newer than the Checkpoints" in told for told in late)
        assert all("was one tensor in 2 modules, and is not any more" in told for told in untied)


def refuse_state(rank: int, folder: Path) -> list[str]:
    told = []
    with memory() as file:
        training = Training(TWO)
        with training.pipeline:
            kept = training.checkpoints(folder)
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
    return told


def test_state_that_could_not_be_read_again_is_refused(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(2, refuse_state, tmp_path):
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


def refuse_inner(rank: int, folder: Path) -> list[str]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what it imports

    run = Run("1f1b", 1, 2)
    training = Training(run)
    with training.pipeline as pipeline:
        adam, group = training.optimizer, run.mesh()["dp"].get_group()
        zero = ZeroRedundancyOptimizer(pipeline.parameters(), torch.optim.AdamW, process_group=group)
        told = [refusal(lambda: Checkpoints(folder, pipeline, other)) for other in (zero, Slow(adam))]  # noqa: B023
        training.steps(range(1))
        kept = Checkpoints(folder, pipeline, Passing(adam))
        kept.save(1)
        before = adam.state[next(pipeline.parameters())]["exp_avg"].clone()
        training.steps(range(1, 2))
        assert kept.load() is not None
        assert torch.equal(adam.state[next(pipeline.parameters())]["exp_avg"], before)
    return told


def test_an_optimizer_that_keeps_its_state_in_another_one_is_refused(pool: Pool, tmp_path: Path) -> None:
    pool.renew()
    for told in pool.run(2, refuse_inner, tmp_path):
        for one, words in zip(told, ("a ZeroRedundancyOptimizer, keeps", "a Slow, keeps"), strict=True):
            assert words in one
            assert "in another one, a AdamW (" in one


def refuse_nan(rank: int, folder: Path) -> list[int]:
    with memory() as file:
        training = Training(TWO)
        with training.pipeline as pipeline:
            kept = training.checkpoints(folder)
            training.steps(range(1))
            kept.commit(1)
            x, target = batch(1)
            pipeline.begin_step(x.fill_(torch.nan), target)
            training.optimizer.step()
            training.optimizer.zero_grad()
            assert "the mean loss is nan" in refusal(lambda: kept.commit(2))
            return steps_in(file)


def test_weights_of_a_step_that_is_refused_are_not_kept(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, refuse_nan, tmp_path) == [[1], [1]]
