"""Findings from what ranks told, as text and JSON: devices that are not here, many links, and failures."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rota.core.errors import PipelineError
from rota.diagnosis import Finding, Report, examine
from rota.runtime.launching import launch as launching
from support import ROOT
from support.json_schema import violations

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
def test_a_self_test_that_is_not_exact_is_a_problem(
    difference: float, told: str, examined: Callable[..., Report]
) -> None:
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
