"""The result of a rehearsal and its report: the verdict first, then the causes of the difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rota.comparison import Comparison, compare
from rota.simulation import simulate
from rota.tasks import Op
from rota.timeline import Timeline
from rota.units import count_text, size_text, time_text

_MOST_ROWS = 8  # of ranks and pairs, the worst first; the others are counted


@dataclass(frozen=True, slots=True)
class Overhead:
    """How late a rank was at its ops' ends: in total, and at the worst op (None: it has no op)."""

    rank: int
    late_us: int
    worst: Op | None
    worst_us: int


@dataclass(frozen=True, slots=True)
class LinkUse:
    """The messages from `sender` to `receiver`: their median times, and bytes per µs over all of them."""

    sender: int
    receiver: int
    num_messages: int
    num_bytes: int
    planned_us: int
    median_us: int
    planned_bytes_per_us: float
    bytes_per_us: float


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The most that a rank held: as planned, in its ops' buffers (without messages), and by how much the process grew.

    `process_bytes` is None if the system does not report it.
    """

    rank: int
    planned_bytes: int
    held_bytes: int
    process_bytes: int | None


@final
@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The result of `rehearse`.

    Attributes:
        planned: The simulated timeline; on accelerators, without what messages cost their ranks and gaps between ops,
            for which no kernel stands.
        measured: The timeline of the step with the median makespan.
        makespans_us: The makespan of each step.
        overheads: For each rank how late it was at its ops' ends, in the same step.
        links: For each pair of ranks the durations of its messages, in the same step.
        memory: For each rank the memory that it held; empty unless memory was allocated.
        device: The type of device that each rank had.
    """

    planned: Timeline
    measured: Timeline
    makespans_us: tuple[int, ...]
    overheads: tuple[Overhead, ...]
    links: tuple[LinkUse, ...]
    memory: tuple[MemoryUse, ...] = ()
    device: str = "cpu"

    @property
    def comparison(self) -> Comparison:
        """Planned and measured, op by op."""
        return compare(self.planned, self.measured)

    def to_text(self) -> str:
        """The report that `rota rehearse` prints: the verdict, then the causes of the difference."""
        tables = [
            _difference(self.comparison, self.device),
            _overhead_table(self),
            _link_table(self),
            _memory_table(self),
        ]
        return "\n\n".join([self.verdict(), *self._left_out(), *(table for table in tables if table)])

    def _left_out(self) -> list[str]:
        """What the simulated time leaves out, as no kernel stands for it."""
        plan = self.measured.plan
        if self.planned.plan.placement.occupied_us == plan.placement.occupied_us:
            return []
        return [
            f"The simulated time is without what messages cost their ranks and gaps between ops, because a rehearsal "
            f"on devices does not have them. With these, the plan takes {time_text(simulate(plan).makespan_us)}."
        ]

    def verdict(self) -> str:
        """One line: the plan ran to its end, and the duration of a step."""
        planned, measured = self.planned.makespan_us, self.measured.makespan_us
        digits = 1 if planned >= 10_000 else 3
        times = f"{measured / 1000:,.{digits}f} ms against {planned / 1000:,.{digits}f} simulated"
        change = f", {(measured - planned) / planned:+.1%}" if planned else ""
        least, most = (f"{of(self.makespans_us) / 1000:,.{digits}f}" for of in (min, max))
        steps = f"the median of {len(self.makespans_us)} steps, {least} to {most} ms"
        on = "" if self.device == "cpu" else f" on {self.device}"
        return f"runs to its end{on}; {times}{change}" + (f" ({steps})" if len(self.makespans_us) > 1 else "")


@final
@dataclass(frozen=True, slots=True)
class BatchesRehearsal:
    """The result of `rehearse_batches`: the makespans of consecutive batches, as simulated and as measured.

    Attributes:
        planned_us: By batch.
        measured_us: By batch.
    """

    planned_us: tuple[int, ...]
    measured_us: tuple[int, ...]

    def to_text(self) -> str:
        """The sums and their difference, and the batch that differs most."""
        planned, measured = sum(self.planned_us), sum(self.measured_us)
        change = f", {(measured - planned) / planned:+.1%}" if planned else ""
        ratios = [got / max(wanted, 1) for wanted, got in zip(self.planned_us, self.measured_us, strict=True)]
        worst = max(range(len(ratios)), key=ratios.__getitem__)
        return (
            f"{count_text(len(ratios), 'batch', 'es')} run to their end; {measured / 1000:,.1f} ms against "
            f"{planned / 1000:,.1f} simulated{change}; the slowest against its plan is batch {worst} "
            f"({self.measured_us[worst] / 1000:,.1f} ms against {self.planned_us[worst] / 1000:,.1f})"
        )


def _difference(comparison: Comparison, device: str) -> str:
    ops, rest = (
        "waits of the planned length, to the µs",
        "processes that came late, and what the runtime does before it sends",
    )
    if device != "cpu":
        ops, rest = (
            "kernels of the planned length, as calibrated",
            "what devices wait for between kernels, such as their hosts",
        )
    rows = [
        ("later arrivals", comparison.later_arrivals_us, "messages took longer than planned, see below"),
        ("longer ops", comparison.slower_ops_us, ops),
        ("the rest", comparison.rest_us, rest),
    ]
    lines = [f"  {what:<16}{us:>+12,} µs   ({why})" for what, us, why in rows]
    return "\n".join([f"The difference of {comparison.difference_us:+,} µs is made up of:", *lines])


def _overhead_table(rehearsal: Rehearsal) -> str:
    """How late each rank was: an op's end is fixed by its earliest start, so only time after it delays others."""
    rows = [
        f"  {o.rank:<4}{o.late_us:>15,}    " + (f"{o.worst} (+{o.worst_us:,} µs)" if o.worst is not None else "-")
        for o in sorted(rehearsal.overheads, key=lambda o: -o.late_us)
    ]
    return _table("How late each rank was at its ops' ends:", "  rank     late µs    at worst", rows)


def _link_table(rehearsal: Rehearsal) -> str:
    rows = [
        f"  {f'{link.sender}→{link.receiver}':<9}{link.num_messages:>8,}{size_text(link.num_bytes):>10}"
        f"{link.planned_us:>12,}{link.median_us:>11,}{_rate(link.planned_us, link.planned_bytes_per_us):>16}"
        f"{_rate(link.median_us, link.bytes_per_us):>13}"
        for link in sorted(rehearsal.links, key=lambda link: link.planned_us - link.median_us)
    ]
    header = "  ranks    messages     bytes  planned µs  median µs    planned MB/s    real MB/s"
    return _table("What messages took, those furthest behind the plan first:", header, rows) if rows else ""


def _memory_table(rehearsal: Rehearsal) -> str:
    rows = [
        f"  {m.rank:<4}{size_text(m.planned_bytes):>14}{size_text(m.held_bytes):>17}"
        + (f"{size_text(m.process_bytes):>18}" if m.process_bytes is not None else f"{'unknown':>18}")
        for m in sorted(rehearsal.memory, key=lambda m: m.planned_bytes - (m.process_bytes or 0))
    ]
    header = "  rank  planned peak    held by its ops    process grew by"
    title = "Peak memory of each rank (planned: with messages; held by its ops: without):"
    return _table(title, header, rows) if rows else ""


def _rate(time_us: int, bytes_per_us: float) -> str:
    return f"{bytes_per_us:,.0f}" if time_us else "any"


def _table(title: str, header: str, rows: list[str]) -> str:
    more = [f"  … and {count_text(len(rows) - _MOST_ROWS, 'more row')}"] if len(rows) > _MOST_ROWS else []
    return "\n".join([title, header, *rows[:_MOST_ROWS], *more])
