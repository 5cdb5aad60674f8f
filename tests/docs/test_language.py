"""What users read is plain English: a few phrases that are not have crept in before."""

import re

from support import ROOT

#: Each with what to write. Docstrings and messages in the code count as well.
BANNED = {
    r"(?<!-)(?<!\.)\banew\b": "again",  # not the option of a benchmark
    r"\b[Mm]end(s|ed|ing)?\b": "fix",
    r"likewise\b": "say it again",
    r"told below\b": "explained below",
    r"somebody else's\b": "say whose",
    r"\b[Ii]n place of\b": "instead of",
    r"takes? the place of\b": "replaces",
    r"\b(forwards?|backwards?|tensors?|itself|dtype|inputs|targets|layout|those|ranks?) alone\b": "only",
    r"suffices?\b": "is enough",
    r"equally many\b": "the same number of",
    r"for want of\b": "for lack of",
    r"\bhence\b": "so",
    r"hand(s|ed)? on\b": "pass on",
    r"is wanted here\b": "expected",
    r"\b(µs|bytes?|times|twice|ops|lines?|process|seconds?) an? (rank|µs|step|second|micro-batch|op)\b": "per",
    r"\b(ms|µs|s|page|patch|bar|rectangle|quad) a (frame|question|rank|micro-batch|step)\b": "per",
    r"\b(page|patch|bar|rectangle|quad|process) an op\b": "per",
    r"\bone (page|bar|rectangle|quad|file|process) an? \w+\b": "one … per",
    r"what layers take\b": "what layers cost",
    r"is none that\b": "say what it is",
    r"steady state is below\b": "lower bound",
    r"\bleast (…|\.\.\.) most\b": "min … max",
    r"\b[Ss]aving a training\b": "checkpointing",
    r"plan against truth\b": "predicted vs. measured",
    r"held against\b": "compared with",
    r"bettered\b": "improved",
    r"dearer\b": "more expensive",
    r"comes? true\b": "say how far the prediction was off",
    r"\bgo(es)? on where\b": "continue where",
    r"\bNot (modelled|checked|counted|measured) is\b": "is not modelled",
    r"longest way\b": "longest path",
    r"write such as\b": "write, for example,",
    r"\b(it|them|one) by (`rota |--?[a-z])": "with",
    r"cannot be told\b": "is unknown; cannot be distinguished",
    r"\d %(?! len\()": "30%",
    r"\b(has|have) not run (on|yet)\b": "has not been run",
}
#: Old texts stay as they were.
FILES = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("benchmarks/*/README.md"),
    ROOT / "problems" / "README.md",
    *(path for kind in ("py", "html", "js") for path in ROOT.glob(f"src/rota/**/*.{kind}")),
    *ROOT.glob("examples/*.py"),
    *ROOT.glob("benchmarks/*/*.py"),
]
BY_DESIGN = {"CONTRIBUTING.md"}  # its page of style quotes them


def test_no_banned_phrase() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]} -> {better}"
        for path in FILES
        if path.name not in BY_DESIGN
        for text in [path.read_text()]
        for phrase, better in BANNED.items()
        if re.search(phrase, text)  # the lines are many, and most pages have none
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(phrase, line)
    ]
    assert found == []
