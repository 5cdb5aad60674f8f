"""benchmarks/gpu/result.json: what the tests on accelerators have seen, to be sent back."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, final

import pytest

FORMAT = 1
FOLDER = "gpu/"


@final
class Results:
    """Gathers the outcomes of tests, and the numbers that they gave to `record_property`."""

    def __init__(self) -> None:
        self.machine: dict[str, Any] = {}
        self._began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._tests: dict[str, dict[str, Any]] = {}

    def add(self, report: pytest.TestReport) -> None:
        """A test's call, or a setup that skips or fails."""
        if FOLDER not in report.nodeid or (report.when != "call" and report.passed):
            return
        name = report.nodeid.rpartition(FOLDER)[2]
        test: dict[str, Any] = {"outcome": report.outcome, "seconds": round(report.duration, 1)}
        if report.skipped and isinstance(report.longrepr, tuple):
            test["reason"] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            test["reason"] = report.longreprtext[-4000:]
        test["numbers"] = dict(report.user_properties)
        self._tests[name] = test

    def write(self, file: Path) -> None:
        """Write it all, if a test has run."""
        if any(test["outcome"] != "skipped" for test in self._tests.values()):
            document = {"format": FORMAT, "began": self._began, "machine": self.machine, "tests": self._tests}
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(document, indent=1) + "\n")
