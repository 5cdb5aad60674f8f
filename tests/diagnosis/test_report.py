"""Findings from what ranks told, as text and JSON: devices that are not here, many links, and failures."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rota.core.errors import PipelineError
from rota.diagnosis import Finding, Report, examine
from rota.diagnosis.examination import TOLERANCE
from rota.diagnosis.rank import examine_together, measure_links, plan_of, train
from rota.runtime.launching import launch as launching
from support import ROOT
from support.json_schema import violations
from support.pool import Pool

SCHEMA = json.loads((ROOT / "docs/doctor.schema.json").read_text())
GB = 10**9


def gpu(number: int, host: str = "node1") -> dict[str, Any]:
    memory = {"free_bytes": 84 * GB, "total_bytes": 85 * GB}
    return {"host": host, "device": f"cuda:{number}", "name": "NVIDIA H100", **memory}


def link(a: int, b: int, rate: int, latency_ns: int = 14_000) -> dict[str, Any]:
    return {"ranks": [a, b], "latency_ns": latency_ns, "bytes_per_s": rate}


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """The report where ranks write these results, and then fail with a text, if there is one."""

    def report_of(results: dict[str, Any], failure: str = "") -> Report:
        def launch(_plan: Any, _script: str, arguments: list[str], **_: Any) -> None:
            with open(arguments[0], "w") as file:
                file.writelines(f"{json.dumps(told)}\n" for told in results.items())
            if failure:
                raise PipelineError(failure)

        monkeypatch.setattr(launching, "launch", launch)
        report = examine(2)
        assert [*violations(json.loads(report.to_json()), SCHEMA)] == []
        return report

    return report_of


def lines(report: Report) -> list[tuple[str, str, str]]:
    return [(each.level, each.about, each.text) for each in report.findings if each.about not in ("Python", "Rota")]


def test_devices_links_and_the_self_test(examined: Callable[..., Report]) -> None:
    found = {"ranks": [gpu(0), gpu(1, "node2")], "links": [link(0, 1, 45 * GB)], "self_test": 0.0}
    report = examined(found)
    assert lines(report)[-4:] == [
        ("ok", "rank 0", "cuda:0, NVIDIA H100, node1, 84 GB of 85 GB free"),
        ("ok", "rank 1", "cuda:1, NVIDIA H100, node2, 84 GB of 85 GB free"),
        ("ok", "link 0-1", "45 GB/s, 14 µs"),
        ("ok", "self-test", "training gives the losses and weights of the unsplit model, within 0e+00"),
    ]
    assert report.exit_code == 0
    assert json.loads(report.to_json())["links"] == found["links"]


def test_many_links_are_one_line(examined: Callable[..., Report]) -> None:
    links = [link(0, b, b * GB, 1000 * b) for b in range(1, 8)]
    report = examined({"ranks": [gpu(i) for i in range(8)], "links": links, "self_test": 1e-16})
    assert ("ok", "7 links", "1 GB/s (0-1) to 7 GB/s (0-7), 1 µs to 7 µs") in lines(report)
    assert ("ok", "rank 7", "cuda:7, NVIDIA H100, 84 GB of 85 GB free") in lines(report)


@pytest.mark.parametrize(("difference", "told"), [(2e-10, "off by 2.0e-10"), (float("inf"), "not finite")])
def test_a_self_test_that_is_off_is_a_problem(difference: float, told: str, examined: Callable[..., Report]) -> None:
    report = examined({"ranks": [gpu(0)], "links": [], "self_test": difference})
    assert report.exit_code == 1
    assert ("skipped", "links", "there is one rank") in lines(report)
    assert report.findings[-1].text == f"losses or weights are {told}, not the unsplit model's"
    assert json.loads(report.to_json())["self_test"]["exact"] is False


def test_what_fails_is_a_problem_and_what_follows_is_skipped(examined: Callable[..., Report]) -> None:
    report = examined({"ranks": [gpu(0), gpu(1)]}, "rank 1 ended with SIGKILL")
    assert lines(report)[-2:] == [
        ("problem", "links", "rank 1 ended with SIGKILL"),
        ("skipped", "self-test", "not reached"),
    ]
    assert report.exit_code == 1
    assert "NCCL_DEBUG=WARN" in report.to_text()


def test_each_finding_is_a_line_with_its_remedy_below() -> None:
    findings = (Finding("ok", "rank 0", "a\nb\x1b[2J"), Finding("problem", "self-test", "it broke", "fix it"))
    assert Report(findings, {}).to_text().splitlines() == [
        "ok       rank 0     a\\nb\\x1b[2J",
        "problem  self-test  it broke",
        "                    -> fix it",
        "",
        "1 problem: Rota does not run here as it should; see the remedy above.",
    ]


# --- what ranks measure and compute, on real processes: also that what is wrong there is found ------------------------


CPU = torch.device("cpu")


def examine_on(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    examine_together(lambda name, result: found.update({name: result}))
    return found


def test_the_first_rank_gets_all_results(pool: Pool) -> None:
    first, *others = pool.run(2, examine_on)
    assert others == [{}]
    assert [rank["device"] for rank in first["ranks"]] == ["cpu", "cpu"]
    assert len(first["links"]) == 1
    assert first["self_test"] <= TOLERANCE


def links_of(rank: int) -> list[dict[str, Any]]:
    return measure_links(CPU, lambda: None)


def test_each_pair_is_measured(pool: Pool) -> None:
    first, *others = pool.run(3, links_of)
    assert others == [first] * 2
    assert [link["ranks"] for link in first] == [[0, 1], [0, 2], [1, 2]]
    assert min(min(link["latency_ns"], link["bytes_per_s"]) for link in first) > 0


def wrongly(rank: int, on: int, factor: float) -> float:
    """One rank computes something else than the others think."""
    right = nn.Tanh.forward
    if rank == on:
        nn.Tanh.forward = lambda self, x: torch.tanh(x) * factor  # type: ignore[method-assign]
    try:
        return train(plan_of(2), CPU)
    finally:
        nn.Tanh.forward = right  # type: ignore[method-assign]


def test_what_one_rank_computes_wrongly_is_found(pool: Pool) -> None:
    assert max(pool.run(2, wrongly, 1, 1 + 1e-8)) > TOLERANCE
