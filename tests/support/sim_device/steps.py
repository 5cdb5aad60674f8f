"""A small runtime: executes lists of device steps on simulated devices, with an addition instead of each op.

It uses memory as the real runtime does: received values come into buffers, what is sent is held until its release, and
gradients are read and written by ops, reductions, sums and the optimizer. So each wait of a list has its use.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import torch

from rota.programs.device_steps import DeviceProgram, Step
from rota.tasks import Op, Transfer
from support.sim_device.device import Event, SimDevice, Stream
from support.sim_device.tensors import receive_into, sent_from

Mail = dict[Transfer, deque[torch.Tensor]]


class StepRunner:
    """One rank. `run` yields where its host waits for another rank's message."""

    def __init__(self, rank: int) -> None:
        self.device = SimDevice(f"rank {rank}")
        self.events: dict[int, Event] = {}
        self.arriving: dict[Op, list[torch.Tensor]] = defaultdict(list)
        self.buffers: dict[Transfer, torch.Tensor] = {}
        self.made: dict[Op, torch.Tensor] = {}
        self.sent: dict[Transfer, torch.Tensor] = {}
        self.gradients: dict[object, torch.Tensor] = {}  # by stage, and of tied weights by their ranks

    def stream(self, step: Step) -> Stream:
        return self.device.stream(step.stream)

    def run(self, program: DeviceProgram, mail: Mail) -> Iterator[None]:
        """A step of training: the program's steps, then the optimizer."""
        awaited = program.awaited
        self.tied = [step.subject for step in program.steps if step.what == "sum"]
        with self.device.active():
            for of in (*self.tied, *(step.subject.stage for step in program.steps if isinstance(step.subject, Op))):
                if of not in self.gradients:
                    self.gradients[of] = torch.zeros(1, device="sim")
        for i, step in enumerate(program.steps):
            while step.what == "receive" and not mail[self.transfer(step)]:
                yield
            with self.device.active():
                stream = self.stream(step)
                for before in step.waits:
                    stream.wait_event(self.events[before])
                self.execute(step, stream, mail)
                if i in awaited:
                    self.events[i] = stream.record_event()
        with self.device.active():
            for gradient in self.gradients.values():
                gradient.mul_(0)
            self.made.clear()

    def transfer(self, step: Step) -> Transfer:
        assert isinstance(step.subject, Transfer)
        return step.subject

    def execute(self, step: Step, stream: Stream, mail: Mail) -> None:
        if step.what == "allocate":
            self.buffers[self.transfer(step)] = torch.empty(1, device="sim")
        elif step.what == "receive":
            transfer = self.transfer(step)
            buffer = self.buffers.pop(transfer)
            receive_into(buffer, mail[transfer].popleft(), str(step), stream)  # type: ignore[arg-type]
            self.arriving[transfer.target].append(buffer)
        elif step.what == "send":
            transfer = self.transfer(step)
            self.sent[transfer] = self.made[transfer.source]
            mail[transfer].append(sent_from(self.sent[transfer], str(step), stream))  # type: ignore[arg-type]
        elif step.what == "release":
            transfer = self.transfer(step)
            del self.sent[transfer]
            if all(other.source != transfer.source for other in self.sent):
                self.made.pop(transfer.source)
        elif step.what == "run":
            assert isinstance(step.subject, Op)
            self.run_op(step.subject)
        elif step.what in ("reduce", "sum"):
            of = step.subject.stage if isinstance(step.subject, Op) else step.subject
            self.device.launch(str(step), [], [self.gradients[of].block], stream)  # type: ignore[attr-defined]

    def run_op(self, op: Op) -> None:
        value = torch.ones(1, device="sim")
        for given in self.arriving.pop(op, []):
            value = value + given
        self.made[op] = value
        for of in [op.stage, *self.tied] if op.kind.makes_weight_gradients else self.tied:
            self.gradients[of].add_(value)


def run_steps(programs: Sequence[DeviceProgram], num_steps: int = 2) -> list[StepRunner]:
    """Some steps of training on all ranks. Raises RaceError or FreedTooEarlyError."""
    runners = [StepRunner(program.rank) for program in programs]
    mail: Mail = defaultdict(deque)
    for _ in range(num_steps):
        hosts = [runner.run(program, mail) for runner, program in zip(runners, programs, strict=True)]
        while hosts:
            hosts = [host for host in hosts if next(host, hosts) is None]
    for runner in runners:
        runner.device.check()
    return runners
