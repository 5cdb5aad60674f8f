"""What ranks measure and compute, on real processes: also that what is wrong there is found."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rota.diagnosis import measuring
from rota.diagnosis.rank import Options, Step
from rota.diagnosis.self_test import TOLERANCE, Case, full_cases, merged, quick_cases, run_case
from rota.diagnosis.sessions import run_steps
from support.pool import Pool

CPU = torch.device("cpu")

# --- the self-test ----------------------------------------------------------------------------------------------------


def test_cases_are_those_that_are_defined() -> None:
    assert [case.family for case in quick_cases(4)] == ["1f1b", "interleaved_1f1b", "zb_h1", "dualpipe"]
    assert "dualpipe" not in [case.family for case in quick_cases(3)]
    assert len(full_cases(4, with_sizes=True)) == len(full_cases(4, with_sizes=False)) + 6
    assert str(Case("1f1b", 2, 4)) == "1f1b on 2 ranks, messages of 1 kB"
    (edge, *_) = Case("1f1b", 2, 4).plan().placement.edges
    assert edge.num_bytes == Case("1f1b", 2, 4).message_bytes == 1000


def exactly(rank: int, case: Case) -> dict[str, Any]:
    return run_case(case, CPU, 30.0)


@pytest.mark.dist
@pytest.mark.parametrize("family", ["1f1b", "zb_v", "chimera", "varuna", "forward_only"])
def test_a_case_is_exact(family: str, pool: Pool) -> None:
    for found in pool.run(2, exactly, Case(family, 2, 4)):
        assert found["difference"] <= TOLERANCE
        assert found["trains"] == (family != "forward_only")
        assert found["step_ns"] > 0
        assert found["open_files"] > 0


def wrongly(rank: int, case: Case, on: int, factor: float) -> dict[str, Any]:
    """One rank computes something else than the others think."""
    right = nn.Tanh.forward
    if rank == on:
        nn.Tanh.forward = lambda self, x: torch.tanh(x) * factor  # type: ignore[method-assign]
    try:
        return run_case(case, CPU, 30.0)
    finally:
        nn.Tanh.forward = right  # type: ignore[method-assign]


@pytest.mark.dist
@pytest.mark.parametrize("on", [0, 1])
def test_a_rank_that_computes_slightly_wrong_is_found(on: int, pool: Pool) -> None:
    for found in pool.run(2, wrongly, Case("1f1b", 2, 4), on, 1 + 1e-8):
        assert TOLERANCE < found["difference"] < 1e-6


def without_gradients(rank: int, case: Case) -> dict[str, Any]:
    """Rank 1 loses what its optimizer would need."""
    from rota import Pipeline

    right = Pipeline.step

    def step(self: Pipeline, *arguments: Any) -> float:
        loss = right(self, *arguments)
        for parameter in self.parameters() if rank == 1 else ():
            parameter.grad = None
        return loss

    Pipeline.step = step  # type: ignore[method-assign, assignment]
    try:
        return run_case(case, CPU, 30.0)
    finally:
        Pipeline.step = right  # type: ignore[method-assign]


@pytest.mark.dist
def test_gradients_that_are_missing_are_found(pool: Pool) -> None:
    of_ranks = pool.run(2, without_gradients, Case("1f1b", 2, 4))
    assert [found["difference"] for found in of_ranks] == [of_ranks[0]["difference"], math.inf]
    assert of_ranks[0]["difference"] <= TOLERANCE
    assert merged(of_ranks)["difference"] == math.inf


# --- measurements -----------------------------------------------------------------------------------------------------


def links_of(rank: int, changes: bool) -> list[dict[str, Any]]:
    right = dist.send

    def send(tensor: torch.Tensor, *arguments: Any) -> None:
        right(torch.zeros_like(tensor), *arguments)

    if changes and rank == 1:
        dist.send = send  # type: ignore[assignment]
    ended: list[str] = []
    try:
        found = measuring.links(CPU, (1_000, 1_000_000), ended.append)
    finally:
        dist.send = right
    assert ended == ["0-1", "0-2", "1-2"]
    return found


@pytest.mark.dist
def test_links_between_all_pairs(pool: Pool) -> None:
    of_ranks = pool.run(3, links_of, False)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    assert [link["ranks"] for link in of_ranks[0]] == [[0, 1], [0, 2], [1, 2]]
    for link in of_ranks[0]:
        assert link["backend"] == "gloo"
        assert link["message_bytes"] == [1_000, 1_000_000]
        assert 0 < min(link["one_way_ns"]) <= max(link["one_way_ns"]) < 60e9
        assert link["intact"]


@pytest.mark.dist
def test_bytes_that_change_on_the_way_are_found(pool: Pool) -> None:
    (found, *_) = pool.run(3, links_of, True)
    assert [link["intact"] for link in found] == [False, True, False]


def clocks_of(rank: int, ahead_ns: int) -> dict[str, Any]:
    right = time.monotonic_ns
    if rank == 1:
        time.monotonic_ns = lambda: right() + ahead_ns
    try:
        return measuring.clocks()
    finally:
        time.monotonic_ns = right


@pytest.mark.dist
def test_clocks_are_asked(pool: Pool) -> None:
    for found in pool.run(2, clocks_of, 0):
        assert found["shared"]
        assert found["offsets_ns"][0] == 0
        assert abs(found["offsets_ns"][1]) < 1e9
    (found, _) = pool.run(2, clocks_of, 10**12)
    assert found["offsets_ns"][1] == pytest.approx(-(10**12), abs=1e9)


def who(rank: int) -> list[dict[str, Any]]:
    return measuring.ranks(measuring.own_device("cpu"))


@pytest.mark.dist
def test_who_the_ranks_are(pool: Pool) -> None:
    found = pool.run(2, who)[0]
    assert [rank["device"] for rank in found] == ["cpu", "cpu"]
    assert {rank["torch"] for rank in found} == {str(torch.__version__)}


# --- sessions: processes of their own ---------------------------------------------------------------------------------


def test_options_travel_as_json() -> None:
    steps = [Step("links", "links", (1, 2)), Step("case", "a case", case=Case("1f1b", 2, 4).to_fields())]
    read = Options.from_json(Options(steps, "cpu", 3.0, 4.0).to_json())
    assert [step._replace(sizes=tuple(step.sizes)) for step in read.steps] == steps
    assert (read.kind, read.timeout_s, read.deadline_s) == ("cpu", 3.0, 4.0)


@pytest.mark.dist
@pytest.mark.faults
def test_a_step_that_fails_is_told_and_the_others_are_done_by_new_processes(capfd: pytest.CaptureFixture[str]) -> None:
    case = Case("1f1b", 2, 4)
    steps = [
        Step("ranks", "the ranks"),
        Step("links", "messages of less than nothing", (-1,)),
        Step("case", str(case), case=case.to_fields()),
    ]
    ranks, links, run = run_steps(2, "cpu", steps, 30.0, time.monotonic() + 120)
    assert (len(ranks.result), ranks.error) == (2, "")
    assert links.result is None
    assert links.error.startswith("rank ")
    assert "RuntimeError" in links.error
    assert run.result["difference"] <= TOLERANCE
    told = capfd.readouterr()
    assert told.out == ""  # standard output is for the report
    assert told.err.count("rota doctor: starting 2 processes on cpu") == 2


@pytest.mark.dist
@pytest.mark.faults
def test_after_two_failures_no_more_is_tried_and_late_steps_are_not_begun() -> None:
    bad = Step("links", "messages of less than nothing", (-1,))
    outcomes = run_steps(2, "cpu", [bad, bad, bad], 30.0, time.monotonic() + 120)
    assert [outcome.was_begun for outcome in outcomes] == [True, True, False]
    assert outcomes[2].error == "not tried after these failures"
    (late,) = run_steps(2, "cpu", [Step("ranks", "the ranks")], 30.0, time.monotonic())
    assert (late.was_begun, late.error) == (False, "no time was left for it")


def _processes_of(doctor: int) -> dict[str, int]:
    """The process id of each rank that a doctor has started, by its RANK."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (folder / "cmdline").read_bytes(), (folder / "status").read_text()
            if b"rota.diagnosis.rank" in command and f"PPid:\t{doctor}\n" in status:
                variables = (folder / "environ").read_bytes().split(b"\0")
                (rank,) = (each for each in variables if each.startswith(b"RANK="))
                found[rank.decode().removeprefix("RANK=")] = int(folder.name)
        except OSError:
            continue
    return found


@pytest.mark.dist
@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGSTOP, "problem  clocks  the run hung (rank 1 never answered"),
        (signal.SIGKILL, "problem  clocks  rank 1 ended with SIGKILL"),
    ],
)
def test_a_rank_that_stops_or_dies_is_a_finding(number: signal.Signals, told: str) -> None:
    command = [sys.executable, "-m", "rota", "doctor", "--ranks", "2", "--timeout", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as doctor:
        assert doctor.stderr is not None
        for line in doctor.stderr:
            if "rota doctor: clocks" in line:
                os.kill(_processes_of(doctor.pid)["1"], number)
                break
        out, err = doctor.communicate(timeout=120)
    assert told in out
    assert "ok       1f1b, 2 ranks" in out  # by new processes
    assert doctor.returncode == 1, err


@pytest.mark.dist
@pytest.mark.faults
def test_a_signal_to_the_doctor_ends_it_and_its_ranks() -> None:
    command = [sys.executable, "-m", "rota", "doctor", "--ranks", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as doctor:
        assert doctor.stderr is not None
        for line in doctor.stderr:
            if "rota doctor: clocks" in line:
                ranks = _processes_of(doctor.pid)
                doctor.send_signal(signal.SIGTERM)
                break
        doctor.communicate(timeout=120)
    assert doctor.returncode == -signal.SIGTERM
    assert len(ranks) == 2
    assert not any(Path("/proc", str(number)).exists() for number in ranks.values())
