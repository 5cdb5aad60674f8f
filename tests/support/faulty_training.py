"""A training in which something goes wrong on one process, and what must come of it, wherever it was."""

import os
import re
import signal
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rota
from rota import Checkpoints, Cluster, Costs, Op, Pipeline, Plan, Stages, place
from rota.runtime import checkpoints as checkpoints_room
from rota.runtime.checkpoints import checkpoint_folder
from rota.runtime.faults.watchdog import EXIT_CODE
from rota.schedules import one_f_one_b, zb_h1
from support.fresh import Ended, run_fresh
from support.networks import Layer, batch_of, loss_fn
from support.pool import Pool
from support.watch_clock import WatchClock, once_stopped

NUM_STEPS, FAULTY_STEP, NUM_MICROBATCHES = 4, 2, 4  # a checkpoint after each step
TIMEOUT_S = 60.0  # which pass at once when a process is stopped, see WatchClock


@dataclass(frozen=True)
class Setup:
    """What is trained and how: "zb" has I and W, "1f1b" has B, "again" R too. `width` of the values between stages."""

    schedule: str = "zb"
    num_ranks: int = 3
    num_replicas: int = 1
    width: int = 6
    asynchronous: bool = False

    @property
    def num_processes(self) -> int:
        return self.num_ranks * self.num_replicas

    def plan(self) -> Plan:
        options: dict[str, Any] = {"zb": {"weight_us": 10}, "again": {"recompute_us": 5}}.get(self.schedule, {})
        costs = Costs.uniform(self.num_ranks, 10, 20, **options)
        placement = place(costs, Cluster.uniform(self.num_ranks))
        return (zb_h1 if self.schedule == "zb" else one_f_one_b)(placement, NUM_MICROBATCHES)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = batch_of(NUM_MICROBATCHES, seed=step)
        return inputs.repeat(1, self.width // 6), targets.repeat(1, self.width // 6)


@dataclass(frozen=True)
class Fault:
    """`how` it goes wrong on `process`, and `when`: "1F2" before that op, "after 1F2", or a key of `_MOMENTS`.

    "kill 1" of process 0 kills process 1, which waits for it then.
    """

    how: str
    process: int
    when: str

    @property
    def victim(self) -> int:
        return int(self.how.partition(" ")[2] or self.process)

    def __str__(self) -> str:
        return f"{self.how}-{self.process}-{self.when.replace(' ', '_')}"


def train(rank: int, setup: Setup, folder: Path, fault: Fault | None = None) -> list[float]:
    """The losses of the steps from the newest checkpoint on."""
    torch.manual_seed(0)
    stages = Stages([Layer(setup.width).double() for _ in range(setup.num_ranks)])
    mesh = rota.mesh(pp=setup.num_ranks, dp=setup.num_replicas)
    if fault is not None:
        os.chdir(folder)  # by which its processes are told from others
        (folder / f"pid{rank}").write_text(str(os.getpid()))
    losses = []
    if fault is not None and fault.how == "stop":
        WatchClock(once_stopped(folder / f"pid{fault.victim}"))
    with Pipeline(stages, setup.plan(), loss_fn, timeout_s=TIMEOUT_S, mesh=mesh, check_data="never") as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        options = {"keep": None, "asynchronous": setup.asynchronous}
        checkpoints = Checkpoints(folder / "saved", pipeline, optimizer, **options)
        found = checkpoints.load()
        for step in range(found.step if found else 0, NUM_STEPS):
            batch = setup.batch(step)
            if fault is not None and step == FAULTY_STEP:
                checkpoints.wait()
                if fault.how == "nan":
                    batch[1][int(fault.when) * len(batch[1]) // NUM_MICROBATCHES] = torch.nan
                elif fault.process == rank:
                    prepare(fault, pipeline, stages)
            losses.append(pipeline.step(*batch))
            pipeline.clip_grad_norm_(10.0)
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step + 1)
    return losses


def prepare(fault: Fault, pipeline: Pipeline, stages: Stages) -> None:
    """Let it happen at its moment."""
    act = _ACTS[fault.how] if fault.victim == fault.process else partial(_kill_process, fault.victim)
    if fault.when in _MOMENTS:
        _MOMENTS[fault.when](pipeline, stages[pipeline.rank], act)
        return
    base = pipeline._engine.plans.base
    hooks = base.reductions.hooks.after if fault.when.startswith("after ") else base.reductions.hooks.before
    op = Op.parse(fault.when.removeprefix("after "))
    assert op in pipeline.plan.orders[pipeline.rank]
    hooks[op] = act
    base.execution.bind(base.reductions.hooks)


def _raises(error: BaseException) -> Callable[..., Any]:
    def act(*_: Any, **__: Any) -> Any:
        raise error

    return act


def _kill_process(process: int, *_: object, **__: object) -> None:
    """Another one, when it waits for this one."""
    time.sleep(0.3)
    os.kill(int(Path(f"pid{process}").read_text()), signal.SIGKILL)


def _shut_sockets(*_: Any, **__: Any) -> None:
    """All connections of this process: those of Gloo, as the processes met by a file."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6):
                        found.getpeername()  # fails on one that only listens
                        found.shutdown(socket.SHUT_RDWR)


_ACTS: dict[str, Callable[..., Any]] = {
    "kill": lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raises(ValueError("broken on purpose")),
    "interrupt": _raises(KeyboardInterrupt()),
    "exit": _raises(SystemExit(3)),
    "fill": _raises(OSError(28, "No space left on device")),
    "shut": _shut_sockets,
}


def _in_third_forward(pipeline: Pipeline, stage: nn.Module, act: Callable[[], Any]) -> None:
    calls = iter(range(1000))
    stage.register_forward_pre_hook(lambda *_: act() if next(calls) == 2 else None)


def _in_third_backward(pipeline: Pipeline, stage: nn.Module, act: Callable[[], Any]) -> None:
    calls = iter(range(1000))

    def watch(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(lambda ___: act() if next(calls) == 2 else None)

    stage.register_forward_hook(watch)


def _in_reduction(pipeline: Pipeline, stage: nn.Module, act: Callable[[], Any]) -> None:
    """It was begun, and is not waited for yet."""
    (all_reduce,) = pipeline._engine.gradients._all_reduces.values()
    all_reduce.finish = act  # type: ignore[method-assign]


def _in(path: str) -> Callable[[Pipeline, nn.Module, Callable[[], Any]], None]:
    """In the call of what the pipeline has at this path."""
    holder, _, name = path.rpartition(".")
    return lambda pipeline, _, act: setattr(attrgetter(holder)(pipeline) if holder else pipeline, name, act)


_MOMENTS: dict[str, Callable[[Pipeline, nn.Module, Callable[[], Any]], None]] = {
    "between steps": lambda pipeline, stage, act: act(),
    "forward": _in_third_forward,
    "backward": _in_third_backward,
    "loss": _in("_engine.compute._loss_fn"),
    "losses": _in("_engine.step_results._totals"),  # all micro-batches' are there, not added up over the ranks yet
    "reduction": _in_reduction,
    "clip": _in("clip_grad_norm_"),
    "write": lambda pipeline, stage, act: setattr(checkpoints_room, "write_file", act),
    "publish": lambda pipeline, stage, act: setattr(checkpoint_folder, "publish", act),
}


def suffer(folder: Path, setup: Setup, fault: Fault) -> list[Ended]:
    """How its processes end, each by itself; none is left."""
    stopped = {fault.victim} if fault.how == "stop" else set()
    survivors = {*range(setup.num_processes)} - stopped
    ended = run_fresh(folder, setup.num_processes, train, setup, folder, fault, expected=survivors)
    for process in survivors:
        assert ended[process].exit_code is not None, f"process {process} was left: {ended}"
    assert processes_in(folder) == []
    assert {each.stderr.count("rota: no progress") for each in ended} <= {0, 1}
    return ended


def until(condition: Callable[[], bool], limit_s: float = 200) -> bool:
    """Whether it holds in the end, at the latest when the limit is over."""
    end_s = time.monotonic() + limit_s
    while not (holds := condition()) and time.monotonic() < end_s:
        time.sleep(0.01)
    return holds


def processes_in(folder: Path) -> list[str]:
    """Ids of the processes that work in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append(process.name)
    return found


def assert_told(ended: list[Ended], setup: Setup, fault: Fault) -> None:
    """The right message on every process that could tell."""
    name = f"rank {fault.victim % setup.num_ranks}"
    if setup.num_replicas > 1:
        name += f" of replica {fault.victim // setup.num_ranks}"
    others = [each for process, each in enumerate(ended) if process != fault.victim]
    if fault.how == "stop":
        for each in others:
            assert each.exit_code == EXIT_CODE, each
            assert each.stderr == others[0].stderr
        assert f"rota: no progress for {TIMEOUT_S:g} s, so all ranks end: {name} never answered" in others[0].stderr
        assert f"    {name} did not answer within 5 s" in others[0].stderr
        return
    (own_code, own_line), told = _expected(fault, name)
    for process, each in enumerate(ended):
        if fault.how == "shut" and _was_ended_by_the_others(each):
            continue
        is_victim = process == fault.victim
        assert each.exit_code == (own_code if is_victim else 1), each
        if is_victim:
            assert re.search(own_line, each.stderr, re.MULTILINE), each
        else:
            assert re.search(told, each.last_line), each


def _was_ended_by_the_others(ended: Ended) -> bool:
    """Whether it was in a send that Gloo never ends (see test_watchdog.py), and ended as others had lost a rank."""
    told = r"rota: rank \d waits for rank \d to receive .+ another rank failed: rank \d: LostRankError: lost "
    return ended.exit_code == EXIT_CODE and re.search(told, ended.last_line) is not None


def _expected(fault: Fault, name: str) -> tuple[tuple[int, str], str]:
    """Of the process itself, exit code and words; the words of the others. Patterns."""
    lost = r"LostRankError: lost (a rank|rank \d) while .+: "
    unknown, first = f"{lost}look there for the first error$", f"{lost}the first error was that of {name}: "
    full = rf"PipelineError: checkpoint: .+process {fault.process}: OSError: \[Errno 28\] No space left"
    nan = rf"PipelineError: step 3: the mean loss is nan \(nan for micro-batch {fault.when} at stage 2 on rank 2\)"
    return {
        "kill": ((-signal.SIGKILL, ""), unknown),
        "shut": ((1, unknown), unknown),
        "raise": ((1, "ValueError: broken on purpose$"), f"{first}ValueError: broken on purpose$"),
        "interrupt": ((1, "KeyboardInterrupt$"), f"{first}KeyboardInterrupt$"),
        "exit": ((3, ""), f"{first}SystemExit: 3$"),
        "fill": ((1, full), full),
        "nan": ((1, nan), nan),
    }[fault.how.split()[0]]


def goes_on_as_if_nothing_had_been(pool: Pool, folder: Path, setup: Setup, undisturbed: list[float]) -> None:
    """New processes find the checkpoint before the fault, and have the losses of the run without it, to the bit."""
    for losses in pool.run(setup.num_processes, train, setup, folder):
        assert losses == undisturbed[FAULTY_STEP:]


def run_case(pool: Pool, folder: Path, setup: Setup, fault: Fault) -> None:
    """All of it."""
    assert_told(suffer(folder, setup, fault), setup, fault)
    goes_on_as_if_nothing_had_been(pool, folder, setup, undisturbed(pool, folder, setup))


_undisturbed: dict[Setup, list[float]] = {}


def undisturbed(pool: Pool, folder: Path, setup: Setup) -> list[float]:
    """The losses of a run without a fault; once for each setup."""
    if setup not in _undisturbed:
        (first, *others) = pool.run(setup.num_processes, train, setup, folder / "undisturbed")
        assert all(losses == first for losses in others)
        _undisturbed[setup] = first
    return _undisturbed[setup]
