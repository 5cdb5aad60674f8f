"""What an examination of a machine found: findings with a level and a remedy, and what was measured."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, final

from rota import reading
from rota.reading import printable
from rota.tables import fitted
from rota.units import count_text

Level: TypeAlias = Literal["ok", "skipped", "warning", "problem"]

SELF_TEST = "self-test"  # what the names of its sections begin with
FORMAT = 1  # of the JSON; docs/doctor.schema.json describes it


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        section: The part of the report that it stands in.
        level: "ok"; "skipped": not examined; "warning": Rota runs, but slower or at a risk; "problem": it does not run.
        about: A few words: what was examined.
        text: What was found.
        remedy: What to do about a warning or a problem.
    """

    section: str
    level: Level
    about: str
    text: str
    remedy: str = ""


@final
class Section:
    """Collects the findings of one part of the report."""

    def __init__(self, name: str) -> None:
        self.findings: list[Finding] = []
        self._name = name

    def ok(self, about: str, text: str) -> None:
        """What was examined is as it should be."""
        self._add("ok", about, text, "")

    def skipped(self, about: str, why: str) -> None:
        """It was not examined."""
        self._add("skipped", about, why, "")

    def warning(self, about: str, text: str, remedy: str) -> None:
        """Rota runs, but slower or at a risk."""
        self._add("warning", about, text, remedy)

    def problem(self, about: str, text: str, remedy: str) -> None:
        """Rota does not run, or not as asked for."""
        self._add("problem", about, text, remedy)

    def _add(self, level: Level, about: str, text: str, remedy: str) -> None:
        # Names of devices, variables and errors come from outside; each finding is one line.
        self.findings.append(Finding(self._name, level, printable(about), printable(text), printable(remedy)))


@final
@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in order, and all that was read or measured, as JSON values."""

    findings: tuple[Finding, ...]
    facts: dict[str, Any]

    @property
    def verdict(self) -> Level:
        """The worst level; what was skipped does not count."""
        levels = {finding.level for finding in self.findings}
        found: tuple[Level, ...] = ("problem", "warning")
        return next((level for level in found if level in levels), "ok")

    @property
    def exit_code(self) -> int:
        """1 if anything is a problem, else 0."""
        return int(self.verdict == "problem")

    def to_text(self, width: int | None = None) -> str:
        """A line per finding, with its remedy below, under the name of its section; the verdict at the end.

        Lines have at most `width` characters.
        """
        lines: list[str] = []
        section, wide = "", 0
        for finding in self.findings:
            if finding.section != section:
                section = finding.section
                wide = max(len(each.about) for each in self.findings if each.section == section)
                lines += ["", section] if lines else [section]
            lines.append(fitted(f"  {finding.level:8} {finding.about:{wide}}  {finding.text}", width, 13 + wide))
            if finding.remedy:
                lines.append(fitted(f"  {'':8} {'':{wide}}  -> {finding.remedy}", width, 16 + wide))
        return "\n".join([*lines, "", fitted(self._summary(), width)])

    def to_json(self) -> str:
        """The findings and facts as JSON; `docs/doctor.schema.json` describes it."""
        findings = [asdict(finding) for finding in self.findings]
        return reading.dump("doctor", {"format": FORMAT, "verdict": self.verdict, "findings": findings, **self.facts})

    def _summary(self) -> str:
        counts = Counter(finding.level for finding in self.findings)
        found = [count_text(counts[level], level) for level in ("problem", "warning") if counts[level]]
        told = " and ".join(found) or "no problem, no warning"
        if counts["problem"]:
            return f"{told}: Rota does not run here as it should; see the remedies above."
        if not any(finding.section.startswith(SELF_TEST) and finding.level == "ok" for finding in self.findings):
            return f"{told}: nothing was found that keeps Rota from running, but the self-test was not run."
        return f"{told}: Rota runs here."


def say(doing: str) -> None:
    """Report progress in a line on standard error, also where that is a file: the next thing may take long."""
    print(f"rota doctor: {doing}", file=sys.stderr, flush=True)


def joined(sections: Iterable[Section]) -> tuple[Finding, ...]:
    """The findings of all sections, in order."""
    return tuple(finding for section in sections for finding in section.findings)
