"""What is around a step, with stages on simulated devices: data, checkpoints, random states, agreement, verify."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rota
from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, place
from rota.models.randomness import RandomStates
from rota.runtime.checkpoints.tensors import read_file
from rota.schedules import NAMED, gpipe, one_f_one_b
from support.checkpoint_runs import Layer, Run, Training, memory, model, serial_losses, stored
from support.networks import (
    StepResult,
    assert_equal_steps,
    batch_of,
    chain,
    loss_fn,
    pipeline_steps,
    serial_step,
)
from support.odd_stages import Calls
from support.pool import Pool
from support.sim_device import SimDevice
from support.sim_device.groups import syncs_inside_steps
from support.sim_device.pool import SimPool

pytestmark = pytest.mark.dist


def simulated(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns on a simulated device, on which it made no race."""
    with SimDevice(f"rank {rank}").checked():
        return function(rank, *args)


def waits_of(act: Callable[[], Any]) -> list[str]:
    """Where the host waits for its device while `act` runs, but for the end of a step."""
    syncs_inside_steps()
    act()
    return syncs_inside_steps()


def plan_of(schedule: str, num_ranks: int, num_microbatches: int = 4) -> Plan:
    return NAMED[schedule](place(Costs.uniform(num_ranks), Cluster.uniform(num_ranks)), num_microbatches)


def test_stages_that_move_stay_tied(device: SimDevice) -> None:
    first, second = Layer(), Layer()
    second.linear.weight, second.scale = first.linear.weight, first.scale
    stages, weight, scale = Stages([first, second]), first.linear.weight, first.scale
    first(torch.ones(2, 6)).sum().backward()
    stages.to("sim", [1])
    assert first.linear.weight is second.linear.weight is weight
    assert first.scale is second.scale is scale
    assert stages.ties == (((0, "linear.weight"), (1, "linear.weight")),)
    assert {t.device.type for t in (weight, weight.grad, scale, second.linear.bias)} == {"sim"}
    assert first.linear.bias.device.type == "cpu"
    with pytest.raises(PipelineError, match="has no memory"):
        Stages([nn.Linear(2, 2, device="meta")]).to("sim")
    with pytest.raises(PipelineError, match="stages has stage 2, but the stages are 0 to 1"):
        stages.to("sim", [2])


def test_weights_are_made_or_loaded_on_the_device(device: SimDevice, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    def made() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200), nn.Linear(200, 4))

    with rota.meta_init():
        whole, on_device, loaded = made(), rota.split(made(), 3), rota.split(made(), 3)
    rota.materialize(rota.split(whole, 1), [0])
    rota.materialize(on_device, [0, 1], "sim:0")
    save_file(dict(whole.state_dict()), tmp_path / "model.safetensors")
    rota.load_pretrained(loaded, [0, 1], tmp_path, device="sim")
    for stages in (on_device, loaded):
        for stage in (0, 1):
            for name, tensor in stages[stage].state_dict().items():
                assert tensor.device.type == "sim"
                assert torch.equal(tensor.cpu(), whole.state_dict()[name])
        assert stages[2].get_parameter("2.weight").is_meta


def refused(rank: int, on: list[str], modules: list[nn.Module]) -> str:
    stages = Stages(modules).to(on[rank], [rank])
    with pytest.raises(PipelineError) as error:
        Pipeline(stages, plan_of("1f1b", 3), loss_fn)
    return str(error.value)


def test_ranks_on_different_types_of_devices_are_refused(pool: Pool) -> None:
    modules = [nn.Linear(6, 6) for _ in range(3)]
    messages = pool.run(3, simulated, refused, ["sim", "cpu", "sim"], modules)
    assert len({*messages}) == 1
    assert messages[0].startswith(
        "the ranks' stages are on devices of different types: those of ranks 0, 2 on sim, those of rank 1 on cpu; "
        "move all: stages.to(rota.local_device()"
    )


def test_a_rank_without_tensors_has_a_device_like_the_others(pool: Pool) -> None:
    plan, batch = plan_of("1f1b", 3), batch_of(4)
    stages = Stages([nn.Linear(6, 6).double(), nn.Tanh(), nn.Linear(6, 6).double()])
    by_rank = SimPool(pool).run(3, pipeline_steps, stages, plan, [batch])
    assert_equal_steps([result for (result,) in by_rank], serial_step(stages, *batch))


def steps_with(rank: int, where: list[str]) -> list[StepResult]:
    batches = [[x.to(device) for x, device in zip(batch_of(4, step), where, strict=True)] for step in range(2)]
    results = pipeline_steps(rank, chain(2), plan_of("1f1b", 2), batches, check_data="first")
    assert all([tensor.device.type for tensor in batch] == where for batch in batches)
    return results


def test_the_batch_may_be_on_the_host_and_the_device(pool: Pool) -> None:
    by_rank = SimPool(pool, ("losses.py",)).run(2, steps_with, ["sim", "cpu"])
    for step in range(2):
        assert_equal_steps([of_rank[step] for of_rank in by_rank], serial_step(chain(2), *batch_of(4, step)))


class Reads(nn.Module):
    """Reads the batch as well as what comes in, and notes which tensors it got."""

    def __init__(self, num_values: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.num_values = num_values
        self.seen: list[tuple[str, int]] = []

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        self.seen.append((values[-1].device.type, id(values[-1])))
        return self.linear(values[0]) * values[-1].sum()


@pytest.mark.usefixtures("alone")
def test_each_tensor_is_copied_once_and_what_is_not_read_stays(device: SimDevice) -> None:
    stages = Stages([Reads(2), Reads(2)], inputs={0: ["x", "mask"], 1: ["mask"]})
    stages.to("sim")
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(1), [0, 0]), 4)
    batch = {"x": torch.ones(8, 6), "mask": torch.ones(1, 6), "unread": torch.ones(8, 1000)}
    with Pipeline(stages, plan, lambda output, target: (output - target).square().mean(), recompute="full") as pipeline:
        before = device.allocated_bytes
        for _ in range(2):
            pipeline.step(batch, torch.zeros(8, 6))
        assert device.allocated_bytes - before < batch["unread"].nbytes
    seen = [read for stage in stages.modules for read in stage.seen]
    assert {kind for kind, _ in seen} == {"sim"}
    assert len({address for _, address in seen[-8:]}) == 1  # one copy of the mask for all


def outputs_on(rank: int) -> list[tuple[str, torch.Tensor]]:
    stages = chain(2).to("sim")
    with Pipeline(stages, plan_of("1f1b", 2), loss_fn) as pipeline:
        outputs = pipeline.forward(batch_of(4)[0] if rank == 0 else None)
    assert outputs is not None
    return [(str(output.device), output.cpu()) for output in outputs]


def test_outputs_come_to_each_ranks_device(pool: Pool) -> None:
    expected = chain(2).run(batch_of(4)[0])
    for outputs in pool.run(2, simulated, outputs_on):
        assert {device for device, _ in outputs} == {"sim:0"}
        torch.testing.assert_close(torch.cat([output for _, output in outputs]), expected.detach())


class Noisy(nn.Module):
    """Dropout, which draws; BatchNorm, whose buffers change; and a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.layers(x) * (1 + self.calls / 8)


def noisy_steps(rank: int, plan: Plan, recompute: str) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    stages = Stages([Noisy() for _ in range(2)])
    torch.manual_seed(7)
    results = pipeline_steps(rank, stages, plan, [batch_of(4, step) for step in range(2)], recompute=recompute)
    return results, stages[rank].state_dict() | {"next": torch.rand(3)}


def test_dropout_and_buffers_are_those_of_the_cpu_and_of_a_recomputation(pool: Pool) -> None:
    plan = NAMED["zb_h1"](place(Costs.uniform(2, weight_us=1), Cluster.uniform(2)), 4)
    reference = pool.run(2, noisy_steps, plan, "none")
    for recompute in ("none", "full"):
        by_rank = SimPool(pool, ("losses.py",)).run(2, noisy_steps, plan, recompute)
        for (results, state), (others, expected) in zip(by_rank, reference, strict=True):
            for result, expected_result in zip(results, others, strict=True):
                assert abs(result.loss - expected_result.loss) < 1e-12
                torch.testing.assert_close(result.gradients, expected_result.gradients, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("alone")
def test_random_states_are_restored_also_where_an_evaluation_fails(device: SimDevice) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.rand((), device=x.device).cpu() < 2 and float(x[0, 0]) == 0:
                raise ValueError("this row is not wanted")
            return self.linear(x)

    stages = Stages([Fails()]).to("sim")
    plan = one_f_one_b(place(Costs.uniform(1), Cluster.uniform(1)), 2)
    with Pipeline(stages, plan, loss_fn) as pipeline:
        host, on_device = torch.get_rng_state(), device.rng_state.clone()
        with pytest.raises(ValueError, match="this row is not wanted"):
            pipeline.evaluate(torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, 6, dtype=torch.float64))
        assert torch.equal(torch.get_rng_state(), host)
        assert torch.equal(device.rng_state, on_device)
        pipeline.step(torch.ones(4, 6, dtype=torch.float64), torch.zeros(4, 6, dtype=torch.float64))
        assert torch.equal(device.rng_state, on_device)


def test_a_draw_from_the_device_is_seen_and_undone(device: SimDevice) -> None:
    states = RandomStates(nn.Identity())
    first = torch.rand(3, device="sim").cpu()
    assert states.changed()
    states.restore()
    assert not states.changed()
    assert torch.equal(torch.rand(3, device="sim").cpu(), first)


def trained(rank: int, run: Run, folder: Path, where: str, begin: int, end: int) -> list[float]:
    """Go on from what is there, and save after each step without a wait of the host; the losses."""
    stages = rota.split(model(), run.plan().num_stages).to(where)
    training = Training(run, stages)
    losses: list[float] = []
    with training.pipeline, closing(training.checkpoints(folder, asynchronous=True)) as checkpoints:
        checkpoints.load()
        for step in range(begin, end):
            losses += training.steps(range(step, step + 1))
            checkpoints.wait()
            save = lambda step=step: checkpoints.save(step + 1)  # noqa: E731
            if where == "sim":
                assert waits_of(save) == []
            else:
                save()
        checkpoints.wait()
    return losses


def test_a_training_goes_on_with_another_plan_on_devices_and_on_cpus(pool: Pool, tmp_path: Path) -> None:
    losses = serial_losses(6)
    for run, where, begin in ((Run("1f1b", 2), "sim", 0), (Run("v", 2), "cpu", 2), (Run("zb", 1), "sim", 4)):
        for losses_of_rank in pool.run(run.num_processes, simulated, trained, run, tmp_path, where, begin, begin + 2):
            assert losses_of_rank == pytest.approx(losses[begin : begin + 2], abs=1e-10)
        tensors, _ = stored(tmp_path / f"step-{begin + 2}")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float64, torch.float32}  # the steps' counts


def hold(checkpoints: rota.Checkpoints) -> threading.Event:
    """Let the thread that writes wait for the result, so that the host has not waited for the copies."""
    held = threading.Event()
    assert checkpoints._thread is not None
    checkpoints._thread.submit(held.wait, 30)
    return held


def saved_while_steps_go_on(rank: int, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of this rank at the save, by name; and those after steps that changed them before it was written."""
    training = Training(Run("1f1b", 2), rota.split(model(), 2).to("sim"))
    with training.pipeline:
        checkpoints = training.checkpoints(folder, asynchronous=True)
        training.steps(range(1))
        held = hold(checkpoints)
        at_save = {name: tensor.detach().cpu().clone() for name, tensor in training.pipeline.named_parameters()}
        checkpoints.save(1)
        for parameter in training.pipeline.parameters():
            parameter.data.mul_(1.0)  # a write of which no version tells
        training.steps(range(1, 3))
        later = {name: tensor.detach().cpu().clone() for name, tensor in training.pipeline.named_parameters()}
        held.set()
        checkpoints.wait()
    return at_save, later


def test_steps_go_on_while_a_checkpoint_is_written(pool: Pool, tmp_path: Path) -> None:
    of_ranks = pool.run(2, simulated, saved_while_steps_go_on, tmp_path)
    tensors, _ = stored(tmp_path / "step-1")
    for at_save, later in of_ranks:
        for name, value in at_save.items():
            assert torch.equal(tensors[f"model/{name}"], value)
            assert not torch.equal(later[name], value)


@pytest.mark.usefixtures("alone")
def test_step_counts_stay_on_the_host_beside_a_weight_without_dims(device: SimDevice, tmp_path: Path) -> None:
    def made() -> Training:
        torch.manual_seed(0)
        layers = {"linear": nn.Linear(6, 6), "weight": nn.Parameter(torch.tensor(0.5))}  # this one has no dims
        scaled = Calls(lambda s, x: torch.tanh(s.linear(x)) * s.weight + x, **layers)
        return Training(Run("1f1b", 1), Stages([scaled.double()]).to("sim"))

    with memory():
        first = made()
        with first.pipeline:
            kept = first.checkpoints(tmp_path)
            first.steps(range(2))
            kept.commit(2)
            kept.save(2)
            expected = first.steps(range(2, 4))
        for step in (None, 2):
            again = made()
            with again.pipeline:
                assert again.checkpoints(tmp_path).load(step) is not None
                counts = [state["step"] for state in again.optimizer.state.values()]
                assert [count.device.type for count in counts] == ["cpu"] * 3
                assert again.steps(range(2, 4)) == expected
                assert waits_of(again.optimizer.step) == []


def pipeline_of(where: str) -> Pipeline:
    plan = one_f_one_b(place(Costs.uniform(1), Cluster.uniform(1)), 2)
    return Pipeline(Stages([nn.Linear(6, 6).double()]).to(where), plan, loss_fn)


def saved_states(rank: int, folder: Path, where: str) -> torch.Tensor:
    with pipeline_of(where) as pipeline:
        torch.manual_seed(5)
        torch.rand(2, device=where)
        rota.Checkpoints(folder, pipeline, None).save(1)
    return torch.cat([torch.rand(3), torch.rand(3, device=where).cpu()])


def loaded_states(rank: int, folder: Path, where: str) -> torch.Tensor:
    with pipeline_of(where) as pipeline:
        torch.manual_seed(50 + rank)
        assert rota.Checkpoints(folder, pipeline, None).load() is not None
    return torch.cat([torch.rand(3), torch.rand(3, device=where).cpu()])


def test_the_devices_random_state_goes_on_or_is_seeded(pool: Pool, tmp_path: Path) -> None:
    """A checkpoint names a device only where there was one."""
    for where, named in (("cpu", None), ("sim", "sim")):
        (drawn,) = pool.run(1, simulated, saved_states, tmp_path / where, where)
        (same,) = pool.run(1, simulated, loaded_states, tmp_path / where, where)
        assert torch.equal(same, drawn)
        _, training = read_file(tmp_path / where / "step-1" / "rank-0.safetensors", None)
        of_device = training["random"]["device"].value
        assert (of_device and of_device["$tuple"][0]) == named
    onto = [pool.run(1, simulated, loaded_states, tmp_path / "cpu", "sim")[0] for _ in range(2)]
    assert torch.equal(onto[0], onto[1])  # by the checkpoint alone
    pool.run(1, simulated, loaded_states, tmp_path / "sim", "cpu")


def verified(rank: int, plan: Plan) -> rota.Verification:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 6))

    stages = rota.split(made(), plan.num_stages).to("sim")
    stages.unsplit = made
    with Pipeline(stages, plan, loss_fn) as pipeline:
        inputs, targets = (tensor.float() for tensor in batch_of(4))
        return rota.verify(pipeline, inputs, targets)


def test_verify_compares_on_the_device(pool: Pool) -> None:
    for verification in pool.run(2, simulated, verified, plan_of("1f1b", 2)):
        assert verification.exact, verification.to_text()
        assert len(verification.comparisons) == 2
