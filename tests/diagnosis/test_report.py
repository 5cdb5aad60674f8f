"""Findings as text and JSON, and what the exit code follows from."""

from __future__ import annotations

import json

from rota.diagnosis.report import Report, Section, joined


def report_of(*levels: str) -> Report:
    section = Section("host")
    for level in levels:
        given = ("what", "found") if level in ("ok", "skipped") else ("what", "found", "do this")
        getattr(section, level)(*given)
    return Report(joined([section]), {"facts": 1})


def test_the_verdict_is_the_worst_level() -> None:
    for levels, verdict, code in (
        ([], "ok", 0),
        (["ok", "skipped"], "ok", 0),
        (["ok", "warning"], "warning", 0),
        (["problem", "warning", "ok"], "problem", 1),
    ):
        report = report_of(*levels)
        assert (report.verdict, report.exit_code) == (verdict, code)
        assert json.loads(report.to_json())["verdict"] == verdict


def test_each_finding_is_a_line_with_its_remedy_below() -> None:
    first, second = Section("software"), Section("self-test, on the CPU")
    first.ok("Python", "3.12")
    first.problem("PyTorch", "none", "install it")
    second.warning("1f1b", "late", "wait")
    assert Report(joined([first, second]), {}).to_text().splitlines() == [
        "software",
        "  ok       Python   3.12",
        "  problem  PyTorch  none",
        "                    -> install it",
        "",
        "self-test, on the CPU",
        "  warning  1f1b  late",
        "                 -> wait",
        "",
        "1 problem and 1 warning: Rota does not run here as it should; see the remedies above.",
    ]


def test_what_comes_from_outside_stays_in_its_line() -> None:
    section = Section("environment variables")
    section.ok("NCCL_X", "a\nb\x1b[2J")
    (finding,) = section.findings
    assert finding.text == "a\\nb\\x1b[2J"


def test_without_a_self_test_the_summary_says_so() -> None:
    assert report_of("ok").to_text().endswith("but the self-test was not run.")
    section = Section("self-test, on the CPU")
    section.ok("1f1b", "exact")
    assert Report(joined([section]), {}).to_text().endswith("no problem, no warning: Rota runs here.")
