"""Which node of a run a command is: from its options, or from what Slurm tells each task of a step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from rota import PipelineError
from rota.cli.commands.run import _refuse_for_one_machine
from rota.cli.main import make_parser
from rota.cli.nodes import given_nodes, parse_head
from rota.cli.requirements import InputError
from rota.runtime.launching.nodes import Nodes, difference, interface_of
from rota.runtime.launching.shared_secret import VARIABLE
from rota.runtime.launching.slurm import first_host, step_of

SECRET = "0123456789abcdef" * 2
STEP = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "1",
}


@pytest.fixture(autouse=True)
def not_on_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STEP:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(VARIABLE, SECRET)


def nodes_of(*options: str) -> Nodes | None:
    return given_nodes(make_parser().parse_args(["run", *options, "plan.json", "train.py"]))


def test_by_options(tmp_path: Path) -> None:
    assert nodes_of() is None
    assert nodes_of("--nodes", "1") is None
    assert nodes_of("--nodes", "3", "--node", "2", "--head", "a.b:29400") == Nodes(3, 2, "a.b", 29400, SECRET.encode())


def test_by_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert nodes_of() == Nodes(2, 1, "gpu07", 20000 + 3457, SECRET.encode())
    monkeypatch.setenv(VARIABLE, SECRET)
    assert nodes_of("--head", "[::1]:5") == Nodes(2, 1, "::1", 5, SECRET.encode())
    assert nodes_of("--nodes", "1") is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--node", "0"], "--node is for several machines; give their number with --nodes N"),
        (["--secret-file", "x"], "--secret-file is for several machines"),
        (["--nodes", "2", "--head", "a:1"], "--nodes 2: give this machine's number, from 0 to 1, with --node I"),
        (["--nodes", "2", "--node", "2", "--head", "a:1"], "give this machine's number, from 0 to 1"),
        (["--nodes", "2", "--node", "0"], "say where node 0 listens, with --head HOST:PORT"),
        (["--nodes", "257", "--node", "0", "--head", "a:1"], "--nodes 257: give 256 at most"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], told: str) -> None:
    with pytest.raises(InputError) as error:
        nodes_of(*options)
    assert told in str(error.value)


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:65536", "::1:5", "a b:1", "a:1:2", "[]:1"])
def test_a_head_without_host_or_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_head(text)


def test_what_slurm_tells() -> None:
    assert step_of({}) is None
    assert step_of({"SLURM_NODEID": "0", "SLURM_NNODES": "2"}) is None  # a batch script
    assert step_of(STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}) is None
    with pytest.raises(PipelineError, match="srun started 8 tasks on 2 nodes; start one per node"):
        step_of(STEP | {"SLURM_STEP_NUM_TASKS": "8"})


def test_the_first_host_of_a_list() -> None:
    lists = {"n[03-05,9],login": "n03", "a,b": "a", "rack[1-2]node[01-16]": "rack1node01", "x-1.example": "x-1.example"}
    for hosts, first in lists.items():
        assert first_host(hosts) == first
    for hosts in ("", "[", ",a", "[a]"):
        with pytest.raises(PipelineError, match="names no host"):
            first_host(hosts)


def test_processes_are_divided_node_by_node() -> None:
    nodes = Nodes(2, 1, "a", 1, b"")
    assert [nodes.numbers(node, 6) for node in range(2)] == [range(3), range(3, 6)]
    with pytest.raises(PipelineError, match="5 processes cannot be divided among 2 nodes"):
        nodes.num_here(5)


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("::ffff:127.0.0.1") == "lo"
    with pytest.raises(PipelineError, match=r"no network interface has the address 192\.0\.2\.1"):
        interface_of("192.0.2.1")


def test_nodes_that_would_run_something_else_are_told_from_each_other() -> None:
    ours = {"Rota": "1", "plan": "a", "options of rota run": "x"}
    assert difference(ours, ours) is None
    assert difference(ours | {"Rota": "2"}, ours) == "it has Rota 2, node 0 has 1; install the same on all nodes"
    assert difference(ours | {"plan": "b"}, ours) == "its plan differs from node 0's; give all nodes the same"
    assert difference({"Rota": "1", "plan": "a"}, ours) == (
        "its options of rota run differ from node 0's; give all nodes the same"
    )


@pytest.mark.parametrize(
    ("option", "is_refused"), [("--backups=b.json", False), ("--min-ranks=1", True), ("--adapt", False)]
)
def test_what_works_on_one_machine_only(option: str, is_refused: bool) -> None:
    arguments = make_parser().parse_args(["run", "--nodes", "2", option, "plan.json", "train.py"])
    with pytest.raises(InputError, match="is for one machine") if is_refused else nullcontext():
        _refuse_for_one_machine(arguments)
