"""Why a run does not go on, in one message: who waits for whom, since when, and which rank never arrived."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rota.units import count_text


class Standing(NamedTuple):
    """What a process does, as it reports it to the others: `words` go on after its name.

    `kind`: it "waits" for others, is "busy" itself, or is "outside" of all that ranks do together; for `still_s`.
    """

    kind: str
    words: str
    still_s: float
    last: str

    def to_text(self) -> str:
        """The fields as a JSON list."""
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> Standing | None:
        """None where the text is none of ours: with torchrun whoever reaches its store can write there."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, list) or len(fields) != 4 or fields[0] not in _KINDS:
            return None
        kind, words, still_s, last = fields
        if not (isinstance(words, str) and isinstance(last, str) and type(still_s) in (int, float)):
            return None
        return cls(kind, words, still_s, last)


def compose(names: Sequence[str], standings: Mapping[int, Standing], limit_s: float, answer_s: float) -> str:
    """The message for all, from the answers of the processes with these `names`; those not in `standings` gave none."""
    lines = [f"rota: no progress for {limit_s:g} s{_SO}{_reason(names, standings)}"]
    for process, name in enumerate(names):
        standing = standings.get(process)
        if standing is None:
            told = f"did not answer within {answer_s:g} s"
        else:
            told = f"{standing.words} for {standing.still_s:.1f} s, {standing.last}"
        lines.append(f"    {name} {told}")
    lines.append("    if it only needs longer, give Pipeline a larger timeout_s")
    return "\n".join(lines)


def reason_of(report: str) -> str:
    """Whom the others wait for, out of what `compose` returned."""
    return printable(report.partition("\n")[0].partition(_SO)[2])


def printable(text: str) -> str:
    """The text without what would move the cursor of a terminal; its lines stay lines."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def alone(name: str, standing: Standing, limit_s: float, why: str) -> str:
    """The message of a process that cannot ask the others."""
    told = f"{standing.words} for {standing.still_s:.1f} s, {standing.last}"
    return (
        f"rota: no progress for {limit_s:g} s, and the other ranks could not be asked ({why}): {name} {told}; if it "
        f"only needs longer, give Pipeline a larger timeout_s"
    )


def _reason(names: Sequence[str], standings: Mapping[int, Standing]) -> str:
    """Whom the others wait for, by what there is to say of it: the silent ones first, they are the surest."""
    silent = [name for process, name in enumerate(names) if process not in standings]
    if silent:
        be, it = ("is", "it") if len(silent) == 1 else ("are", "they")
        return f"{_listed(silent)} never answered; {it} {be} stopped, dead, or without a pipeline"
    by_kind = {kind: [names[p] for p in sorted(standings) if standings[p].kind == kind] for kind in _KINDS}
    if outside := by_kind["outside"]:
        return f"{_listed(outside)} never reached what the others wait for"
    if busy := by_kind["busy"]:
        return f"{_listed(busy)} {'does' if len(busy) == 1 else 'do'} not get on"
    return "all wait for each other; look whether all make the same calls in the same order"


_SO = ", so all ranks end: "
_KINDS = ("waits", "busy", "outside")
_MOST_NAMES = 8


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {count_text(more, 'other')}" if more > 0 else "")
