"""Replicas under torchft: one is lost with all its processes, the other goes on; it comes back with equal weights."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rota import Cluster, Costs, place
from rota.schedules import one_f_one_b
from support import ROOT
from support.faulty_training import processes_in

coordination = pytest.importorskip("torchft.coordination")
pytestmark = [pytest.mark.dist, pytest.mark.faults]

EXAMPLE = ROOT / "examples" / "torchft_replicas.py"
LOST_IN, BACK_IN, NUM_STEPS = 5, 10, 15
LIMIT_S = 200.0

#: The example. Its replicas wait where the test says; replica 1 stops in the middle of a step, with all it has sent.
SCRIPT = f"""
import json, os, runpy, sys, time, torch, torchft
from pathlib import Path

rank, replica = os.environ["RANK"], os.environ["REPLICA"]
start_quorum, allreduce = torchft.Manager.start_quorum, torchft.Manager.allreduce

def wait_for_test(manager):
    Path(f"at-{{os.getppid()}}-{{os.getpid()}}").write_text(str(manager.current_step()))
    while manager.current_step() >= int(Path("may-do").read_text()):
        time.sleep(0.02)
    start_quorum(manager)

def stop(manager, gradient):
    if (replica, rank, manager.current_step()) == ("1", "1", {LOST_IN}) and not Path("stopped").exists():
        Path("stopped").touch()
        time.sleep(1000)
    return allreduce(manager, gradient)

torchft.Manager.start_quorum, torchft.Manager.allreduce = wait_for_test, stop
sys.argv[1:] = ["{NUM_STEPS}"]
done = runpy.run_path("{EXAMPLE}", run_name="__main__")
weights = {{name: weight.tolist() for name, weight in done["pipeline"].named_parameters()}}
Path(f"weights-{{replica}}-{{rank}}").write_text(json.dumps(weights))
"""


def await_(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def start(folder: Path, lighthouse: str, replica: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "REPLICA": str(replica),
    }
    with (folder / f"out-{replica}").open("a") as out:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out, text=True)


def may_do(folder: Path, num_steps: int) -> None:
    """Let the replicas do so many steps."""
    (folder / "new").write_text(str(num_steps))
    (folder / "new").rename(folder / "may-do")  # at once, as they read it all the time


def at(folder: Path, agent: subprocess.Popen[str]) -> list[int]:
    """The step before which each rank of a replica waits, or has waited last."""
    assert agent.poll() is None
    return [int(path.read_text() or -1) for path in folder.glob(f"at-{agent.pid}-*")]


def kill(folder: Path, agent: subprocess.Popen[str]) -> None:
    """The agent and all that it has started."""
    agent.kill()
    agent.wait()
    for path in folder.glob(f"at-{agent.pid}-*"):
        with suppress(ProcessLookupError):
            os.kill(int(path.name.split("-")[2]), signal.SIGKILL)


def steps_of(folder: Path, replica: int) -> list[tuple[int, int]]:
    """Each step that a replica has done, and of how many replicas it was."""
    lines = re.findall(
        rf"^replica {replica}, step (\d+): loss \S+, (\d) replicas$", (folder / f"out-{replica}").read_text(), re.M
    )
    return [(int(step), int(number)) for step, number in lines]


def unsplit() -> dict[str, list[Any]]:
    """The weights after the same steps on one process."""
    example = runpy.run_path(str(EXAMPLE))
    model = example["make_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        x, y = example["make_batch"](step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.tolist() for name, weight in model.named_parameters()}


def test_a_replica_that_comes_back(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(one_f_one_b(place(Costs.uniform(2), Cluster.uniform(2)), 4).to_json())
    (tmp_path / "train.py").write_text(SCRIPT)
    may_do(tmp_path, 0)
    lighthouse = coordination.LighthouseServer("[::1]:0", 1, join_timeout_ms=60_000)
    address = f"http://[::1]:{lighthouse.address().rpartition(':')[2]}"
    agents = [start(tmp_path, address, replica) for replica in range(2)]
    try:
        await_(lambda: [at(tmp_path, agent) for agent in agents] == [[0, 0], [0, 0]])
        may_do(tmp_path, BACK_IN)
        await_((tmp_path / "stopped").exists)
        kill(tmp_path, agents[1])
        await_(lambda: at(tmp_path, agents[0]) == [BACK_IN, BACK_IN])
        agents.append(start(tmp_path, address, 1))
        await_(lambda: at(tmp_path, agents[2]) == [0, 0])
        may_do(tmp_path, NUM_STEPS)
        assert [agents[i].wait(LIMIT_S) for i in (0, 2)] == [0, 0], (tmp_path / "out-0").read_text()[-5000:]
    finally:
        for agent in agents:
            kill(tmp_path, agent)
        lighthouse.shutdown()
    survivor, returned = steps_of(tmp_path, 0), steps_of(tmp_path, 1)
    together = [(step, 2) for step in range(LOST_IN)]
    back_in = next(step for step, num_replicas in survivor if num_replicas == 2 and step >= BACK_IN)
    again = [(step, 2) for step in range(back_in, NUM_STEPS)]  # the lighthouse may hear of it a step or two late
    assert survivor == [*together, *((step, 1) for step in range(LOST_IN, back_in)), *again]
    assert returned == [*together, *again]
    first, second = (
        {
            name: weight
            for rank in range(2)
            for name, weight in json.loads((tmp_path / f"weights-{replica}-{rank}").read_text()).items()
        }
        for replica in range(2)
    )
    assert first == second
    expected = unsplit()
    assert first.keys() == expected.keys()
    for name, weight in first.items():
        torch.testing.assert_close(torch.tensor(weight), torch.tensor(expected[name]), rtol=1e-10, atol=1e-10)
    assert processes_in(tmp_path) == []
