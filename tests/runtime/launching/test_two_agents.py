"""Two machines under torchrun: one is lost, and the training goes on from its checkpoint, alone or when it comes back.

Both agents are on this machine, and meet on the loopback interface.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support import elastic_training
from support.elastic_training import NUM_STAGES, NUM_STEPS, ON_TWO, PLAN, undisturbed
from support.faulty_training import processes_in
from support.pool import Pool

pytestmark = [pytest.mark.dist, pytest.mark.faults]

LOST_IN = 5


def agent(
    folder: Path, node: str, port: int, rendezvous: str, num_nodes: str = "2", conf: str = "", *more: str
) -> subprocess.Popen[str]:
    """The agent of machine "a", which has the rendezvous, or "b", with two ranks each."""
    options = ["--nnodes", num_nodes, "--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.1"]
    options += ["--rdzv-backend", rendezvous, "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"]
    if rendezvous == "c10d":
        options += ["--rdzv-conf", f"is_host={node == 'a'},timeout=200{conf}"]
    else:
        options += ["--node-rank", str("ab".index(node)), "--rdzv-conf", "timeout=200"]
    script = [str(Path(elastic_training.__file__)), str(NUM_STEPS), *more]
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


def lose_b(folder: Path) -> int:
    """Prepare a training that loses machine "b"; a free port."""
    (folder / "faults.json").write_text(json.dumps([(LOST_IN, "b", "node")]))
    for plan in (PLAN, ON_TWO):
        (folder / f"plan-{plan.num_ranks}.json").write_text(plan.to_json())
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def done_in(folder: Path) -> list[tuple[int, float, int]]:
    """Each step, its loss and the number of ranks; the training has resumed once, from step 4."""
    resumed = re.findall(r"^rota: training resumes from .*$", (folder / "stderr-a").read_text(), flags=re.MULTILINE)
    assert resumed == [f"rota: training resumes from {folder}/run/step-4"]
    assert processes_in(folder) == []
    return [tuple(json.loads(line)) for line in (folder / "losses").read_text().splitlines()]


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_a_machine_that_comes_back(pool: Pool, tmp_path: Path, rendezvous: str) -> None:
    """It is gone in the middle of a step, its agent too; torchrun on the other one waits for it."""
    expected = dict(pool.run(NUM_STAGES, undisturbed, PLAN)[0])
    port = lose_b(tmp_path)
    agents = [agent(tmp_path, node, port, rendezvous, "2", "", "any-number") for node in "ab"]
    try:
        assert agents[1].wait(200) == -9
        agents.append(agent(tmp_path, "b", port, rendezvous, "2", "", "any-number"))
        assert [process.wait(200) for process in (agents[0], agents[2])] == [0, 0], (tmp_path / "stderr-a").read_text()
    finally:
        for process in agents:
            process.kill()
    losses = done_in(tmp_path)
    assert [step for step, *_ in losses] == [*range(LOST_IN), *range(4, NUM_STEPS)]
    assert all(loss == expected[step] for step, loss, _ in losses)


def test_the_half_that_is_left_goes_on(pool: Pool, tmp_path: Path) -> None:
    """Each number of ranks has its plan."""
    expected = dict(pool.run(NUM_STAGES, undisturbed, PLAN)[0])
    port = lose_b(tmp_path)
    quick = ",last_call_timeout=3,keep_alive_interval=1"
    agents = [agent(tmp_path, node, port, "c10d", "1:2", quick, "any-number") for node in "ab"]
    try:
        codes = [process.wait(250) for process in agents]
    finally:
        for process in agents:
            process.kill()
    assert codes == [0, -9], (tmp_path / "stderr-a").read_text()
    losses = done_in(tmp_path)
    steps = [(step, 4) for step in range(LOST_IN)] + [(step, 2) for step in range(4, NUM_STEPS)]
    assert [(step, ranks) for step, _, ranks in losses] == steps
    for step, loss, _ in losses:
        assert loss == pytest.approx(expected[step], abs=1e-10)
