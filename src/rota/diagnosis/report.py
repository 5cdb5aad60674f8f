"""What an examination of a machine found: lines with a level and a remedy, and the figures behind them."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, final

from rota.core import reading
from rota.core.reading import printable
from rota.core.text import count_text, fitted

Level: TypeAlias = Literal["ok", "skipped", "problem"]

FORMAT = 2  # of the JSON; docs/doctor.schema.json describes it


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        level: "ok"; "skipped": not examined, and why; "problem": Rota does not run here, or not exactly.
        about: A few words: what was examined.
        text: What was found.
        remedy: What to do about a problem.
    """

    level: Level
    about: str
    text: str
    remedy: str = ""


@final
@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in order, and what was read or measured, as JSON values."""

    findings: tuple[Finding, ...]
    facts: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """1 if anything is a problem, else 0."""
        return int(any(finding.level == "problem" for finding in self.findings))

    def to_text(self, width: int | None = None) -> str:
        """A line per finding, with its remedy below, and the verdict at the end, in lines of at most `width`."""
        lines: list[str] = []
        widest = max((len(finding.about) for finding in self.findings), default=0)
        for finding in self.findings:
            # Names of devices and errors come from outside; each finding is one line.
            text = printable(f"{finding.level:7}  {finding.about:{widest}}  {finding.text}")
            lines.append(fitted(text, width, 11 + widest))
            if finding.remedy:
                lines.append(fitted(f"{'':{11 + widest}}-> {finding.remedy}", width, 14 + widest))
        return "\n".join([*lines, "", fitted(self._summary(), width)])

    def to_json(self) -> str:
        """The findings and facts as JSON; `docs/doctor.schema.json` describes it."""
        verdict = "problem" if self.exit_code else "ok"
        findings = [asdict(finding) for finding in self.findings]
        return reading.dump("doctor", {"format": FORMAT, "verdict": verdict, "findings": findings, **self.facts})

    def _summary(self) -> str:
        num_problems = sum(finding.level == "problem" for finding in self.findings)
        if num_problems:
            return f"{count_text(num_problems, 'problem')}: Rota does not run here as it should; see the remedy above."
        return "No problem: Rota runs here."


def say(doing: str) -> None:
    """Report progress in a line on standard error, also where that is a file: the next thing may take long."""
    print(f"rota doctor: {doing}", file=sys.stderr, flush=True)
