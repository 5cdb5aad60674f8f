"""The deepspeed door: schedules of instructions, as DeepSpeed has them, and as plans."""

from collections.abc import Iterator
from typing import Any

import pytest

import rota
from rota import Cluster, Costs, PlanError, ScheduleError, place, simulate
from rota.compat.deepspeed import schedule as ds, to_plan
from rota.compat.deepspeed.utils import call_to_str
from rota.drawing import to_text
from rota.schedules import forward_only, one_f_one_b
from support.pages import run


class AllForwardsFirst(ds.PipeSchedule):
    """GPipe: the document's way to write a schedule. Backwards go from the last micro-batch to the first."""

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:
        for m in range(self.micro_batches):
            cmds: list[ds.PipeInstruction] = []
            if self.is_first_stage or self.is_last_stage:
                cmds.append(ds.LoadMicroBatch(m))
            if self._valid_stage(self.prev_stage):
                cmds.append(ds.RecvActivation(m))
            cmds.append(ds.ForwardPass(m))
            if self._valid_stage(self.next_stage):
                cmds.append(ds.SendActivation(m))
            yield cmds
        for m in reversed(range(self.micro_batches)):
            if self._valid_stage(self.next_stage):
                yield [ds.RecvGrad(m)]
            yield [ds.BackwardPass(m)]
            if self._valid_stage(self.prev_stage):
                yield [ds.SendGrad(m)]
        yield [ds.ReduceTiedGrads(), ds.ReduceGrads(), ds.OptimizerStep()]


SIZES = [(m, s) for m in (1, 3, 8, 10) for s in (1, 2, 3, 4)]


def kinds(step: list[ds.PipeInstruction]) -> list[type]:
    return [type(instruction) for instruction in step]


@pytest.mark.parametrize(("micro_batches", "stages"), SIZES)
def test_inference(micro_batches: int, stages: int) -> None:
    for stage_id in range(stages):
        schedule = ds.InferenceSchedule(micro_batches, stages, stage_id)
        assert len(list(schedule)) == micro_batches + stages - 1
        assert schedule.num_pipe_buffers() == 2


@pytest.mark.parametrize(("micro_batches", "stages"), SIZES)
def test_training(micro_batches: int, stages: int) -> None:
    for stage_id in range(stages):
        schedule = ds.TrainSchedule(micro_batches, stages, stage_id)
        steps = list(schedule)
        assert len(steps) == 2 * (micro_batches + stages - 1)
        assert kinds(steps[-1])[-3:] == [ds.ReduceTiedGrads, ds.ReduceGrads, ds.OptimizerStep]
        assert schedule.num_pipe_buffers() == max(2, min(stages - stage_id, micro_batches))


@pytest.mark.parametrize("make", [ds.TrainSchedule, ds.InferenceSchedule])
def test_neighbours_exchange_in_the_same_step_and_order(make: Any) -> None:
    """Blocking sends and receives, as DeepSpeed's are, would not wait in a circle."""
    opposite = {ds.SendActivation: ds.RecvActivation, ds.RecvGrad: ds.SendGrad}
    for micro_batches, stages in SIZES:
        for stage_id in range(stages - 1):
            a, b = (list(make(micro_batches, stages, stage)) for stage in (stage_id, stage_id + 1))
            for left, right in zip(a, b, strict=True):
                sent = [opposite[kind] for kind in kinds(left) if kind in opposite]
                assert sent == [kind for kind in kinds(right) if kind in opposite.values()]


def test_what_a_schedule_knows() -> None:
    schedule = ds.TrainSchedule(stages=3, micro_batches=4, stage_id=1)
    assert (schedule.stage, schedule.num_stages, schedule.num_micro_batches) == (1, 3, 4)
    assert (schedule.prev_stage, schedule.next_stage) == (0, 2)
    assert ds.TrainSchedule(4, 3, 0).is_first_stage
    assert ds.TrainSchedule(4, 3, 2).is_last_stage
    assert [schedule._valid_micro_batch(m) for m in (-1, 0, 3, 4)] == [False, True, True, False]
    assert [schedule._valid_stage(s) for s in (-1, 0, 2, 3)] == [False, True, True, False]
    assert [schedule._buffer_idx(m) for m in range(4)] == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="micro-batch 4 has no buffer: micro-batches are 0 to 3"):
        schedule._buffer_idx(4)
    assert [*map(str, next(iter(schedule)))] == [*map(str, next(iter(schedule)))]  # iterating starts afresh
    with pytest.raises(TypeError, match="abstract"):
        ds.PipeSchedule(4, 3, 1)  # type: ignore[abstract]


def test_instructions() -> None:
    load = ds.LoadMicroBatch(0, extra="x")
    assert (load.name, load.buffer_id, load.extra) == ("LoadMicroBatch", 0, "x")  # type: ignore[attr-defined]
    assert repr(ds.LoadMicroBatch(buffer_id=0)) == "LoadMicroBatch(buffer_id=0)"
    assert call_to_str("f", 1, "a", key=None) == ds.call_to_str("f", 1, "a", key=None) == "f(1, 'a', key=None)"


@pytest.mark.parametrize(("micro_batches", "stages"), SIZES)
def test_deepspeeds_own_as_plans(micro_batches: int, stages: int) -> None:
    placement = place(Costs.uniform(stages), Cluster.uniform(stages))
    assert to_plan(ds.TrainSchedule, micro_batches, stages) == one_f_one_b(placement, micro_batches)
    forwards = forward_only(placement.forward_only(), micro_batches)
    assert to_plan(ds.InferenceSchedule, micro_batches, stages) == forwards
    assert to_plan(ds.DataParallelSchedule, micro_batches, 1).num_ops == 2 * micro_batches


def test_ones_own_schedule_is_simulated_and_drawn() -> None:
    costs = Costs.uniform(3, forward_us=10, backward_us=20, boundary_bytes=1000)
    placement = place(costs, Cluster.uniform(3, latency_us=1))
    plan = to_plan(AllForwardsFirst, 4, 3, placement)
    assert [str(op) for op in plan.orders[1]] == ["1F0", "1F1", "1F2", "1F3", "1B3", "1B2", "1B1", "1B0"]
    rota.check(plan)
    timeline = simulate(plan)
    assert timeline.makespan_us == (4 + 2) * 10 + (4 + 2) * 20 + 4  # twice over both links
    assert "rank 2" in to_text(timeline)


class Written(ds.PipeSchedule):
    """One stage's step after step, as given."""

    streams: tuple[str, ...] = ()

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:
        for word in self.streams[self.stage_id].split():
            name, _, buffer = word.partition(":")
            made = getattr(ds, name)
            yield [made(int(buffer)) if buffer else made()]


SEND = "LoadMicroBatch:0 ForwardPass:0 SendActivation:0 RecvGrad:0 BackwardPass:0"
RECEIVE = "RecvActivation:0 LoadMicroBatch:0 ForwardPass:0 BackwardPass:0 SendGrad:0"
TWICE = "LoadMicroBatch:0 ForwardPass:0 SendActivation:0 LoadMicroBatch:1 ForwardPass:1 SendActivation:1"
FORWARDS = "RecvActivation:0 LoadMicroBatch:0 ForwardPass:0 RecvActivation:1 LoadMicroBatch:1 ForwardPass:1"


def without(stream: str, *instructions: str) -> str:
    return " ".join(word for word in stream.split() if word not in instructions)


ONE: dict[str, tuple[str, str]] = {
    "stage 0, step 1: SendActivation(buffer_id=0) finds no output in": (without(SEND, "ForwardPass:0"), RECEIVE),
    "ForwardPass(buffer_id=0) finds no input in its buffer; yield RecvActivation": (
        SEND,
        without(RECEIVE, "RecvActivation:0"),
    ),
    "finds no label in its buffer; yield LoadMicroBatch for this buffer": (SEND, without(RECEIVE, "LoadMicroBatch:0")),
    "stage 0, step 3: BackwardPass(buffer_id=0) finds no gradient in": (without(SEND, "RecvGrad:0"), RECEIVE),
    "is receive 1, but stage 0 sends 0 activations": (without(SEND, "SendActivation:0"), RECEIVE),
    "stage 0, step 5: SendGrad(buffer_id=0) finds no gradient of": (SEND + " SendGrad:0", RECEIVE),
    "SendActivation(buffer_id=0) has no stage to send to": (SEND, RECEIVE + " SendActivation:0"),
    "BackwardPass(buffer_id=0) comes after the gradients were": ("OptimizerStep " + SEND, RECEIVE),
    "LoadMicroBatch(buffer_id=7) names a buffer that does not exist": (SEND.replace(":0", ":7"), RECEIVE),
    "PipeInstruction() is not one of LoadMicroBatch, RecvActivation": ("PipeInstruction " + SEND, RECEIVE),
}
TWO: dict[str, tuple[str, str]] = {
    "stage 0 sends 2 activations, stage 1 receives 1; add RecvActivation": (
        TWICE,
        without(FORWARDS, "RecvActivation:1", "LoadMicroBatch:1", "ForwardPass:1"),
    ),
    "has the input of micro-batch 0, but the labels of 1; load": (
        TWICE,
        "LoadMicroBatch:1 " + without(FORWARDS, "LoadMicroBatch:1"),
    ),
    "stage 0, step 2: LoadMicroBatch(buffer_id=0) overwrites the output of micro-batch 0, still needed; use another": (
        without(TWICE, "SendActivation:0").replace(":1", ":0"),
        FORWARDS,
    ),
    "gradient 0 that stage 1 sends is of micro-batch 1, but stage 0 expects micro-batch 0": (
        TWICE + " RecvGrad:0 BackwardPass:0 RecvGrad:1 BackwardPass:1",
        FORWARDS + " BackwardPass:1 SendGrad:1 BackwardPass:0 SendGrad:0",
    ),
}


@pytest.mark.parametrize("told", [*ONE, *TWO])
def test_streams_that_do_not_fit_are_refused(told: str) -> None:
    streams = {"streams": (ONE | TWO)[told], "num_pipe_buffers": lambda self: 2}
    with pytest.raises(ScheduleError) as error:
        to_plan(type("Mine", (Written,), streams), 2 if told in TWO else 1, 2)
    assert str(error.value).startswith("Mine")
    assert told in str(error.value)


def test_streams_that_leave_something_out_are_no_plan() -> None:
    written = type("Mine", (Written,), {"streams": (SEND, RECEIVE)})
    with pytest.raises(PlanError, match="rank 0 never does 0F1 and 1 more"):
        to_plan(written, 2, 2)
    with pytest.raises(ScheduleError, match="stage 0, step 0: BackwardPass"):
        to_plan(ds.DataParallelSchedule, 2, 2)


def test_ones_own_schedule_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run("coming-from-earlier-systems.md#DeepSpeed", 1)
    assert capsys.readouterr().out == "360\n"
