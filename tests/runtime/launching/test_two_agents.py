"""Two machines under torchrun: one is lost and comes back, and the training goes on from its checkpoint.

Both agents are on this machine, and meet on the loopback interface.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rota import Cluster, Costs, Plan, place
from rota.schedules import one_f_one_b
from support import elastic_training
from support.elastic_training import NUM_MICROBATCHES, NUM_STAGES, train
from support.faulty_training import processes_in
from support.pool import Pool

pytestmark = [pytest.mark.dist, pytest.mark.faults]

PLAN = one_f_one_b(place(Costs.uniform(NUM_STAGES, 100, 200), Cluster.uniform(NUM_STAGES)), NUM_MICROBATCHES)
NUM_STEPS, LOST_IN = 12, 5


def undisturbed(rank: int, plan: Plan) -> list[tuple[int, float]]:
    return train(plan, NUM_STEPS)


def agent(folder: Path, node: str, port: int, rendezvous: str) -> subprocess.Popen[str]:
    """The agent of machine "a", which has the rendezvous, or "b", with two ranks each."""
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.1"]
    options += ["--rdzv-backend", rendezvous, "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"]
    if rendezvous == "c10d":
        options += ["--rdzv-conf", f"is_host={node == 'a'},timeout=200"]
    else:
        options += ["--node-rank", str("ab".index(node)), "--rdzv-conf", "timeout=200"]
    script = [str(Path(elastic_training.__file__)), str(NUM_STEPS)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # for c10d; docs/cluster.md says why
        "NODE": node,
    }
    command = [sys.executable, "-m", "torch.distributed.run", *options, *script]
    with (folder / f"stderr-{node}").open("a") as stderr:
        return subprocess.Popen(command, cwd=folder, env=environment, stderr=stderr, text=True)


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_a_machine_that_comes_back(pool: Pool, tmp_path: Path, rendezvous: str) -> None:
    """It is gone in the middle of a step, its agent too; torchrun on the other one waits for it."""
    expected = dict(pool.run(NUM_STAGES, undisturbed, PLAN)[0])
    (tmp_path / "faults.json").write_text(json.dumps([(LOST_IN, "b", "node")]))
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    agents = [agent(tmp_path, node, port, rendezvous) for node in "ab"]
    try:
        assert agents[1].wait(200) == -9
        agents.append(agent(tmp_path, "b", port, rendezvous))
        assert [one.wait(200) for one in (agents[0], agents[2])] == [0, 0], (tmp_path / "stderr-a").read_text()
    finally:
        for one in agents:
            one.kill()
    told = re.findall(r"^rota: training resumes from .*$", (tmp_path / "stderr-a").read_text(), flags=re.MULTILINE)
    assert told == [f"rota: training resumes from {tmp_path}/run/step-4"]
    losses = [json.loads(line)[:2] for line in (tmp_path / "losses").read_text().splitlines()]
    assert [step for step, _ in losses] == [*range(LOST_IN), *range(4, NUM_STEPS)]
    assert all(loss == expected[step] for step, loss in losses)
    assert processes_in(tmp_path) == []
