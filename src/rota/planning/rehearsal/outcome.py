"""The result of a rehearsal and its report: the verdict first, then the causes of the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from rota.comparison import Comparison, compare
from rota.simulation import simulate
from rota.tables import fitted, table_lines
from rota.tasks import Op
from rota.timeline import Timeline
from rota.units import angle_repr, count_text, size_text, time_text

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

    def __str__(self) -> str:
        """One line."""
        return f"Rehearsal of {count_text(self.planned.num_ranks, 'rank')}: {self.verdict()}"

    __repr__ = angle_repr

    @property
    def comparison(self) -> Comparison:
        """Planned and measured, op by op."""
        return compare(self.planned, self.measured)

    def to_text(self, width: int | None = None) -> str:
        """The report that `rota rehearse` prints, in lines of at most `width`: verdict and causes of the difference."""
        tables = [
            _difference(self.comparison, self.device, width),
            _overhead_table(self, width),
            _link_table(self, width),
            _memory_table(self, width),
        ]
        told = [self.verdict(), *self._left_out()]
        return "\n\n".join([*(fitted(text, width) for text in told), *(table for table in tables if table)])

    def _left_out(self) -> list[str]:
        """What the simulated time leaves out, as no kernel stands for it."""
        plan = self.measured.plan
        if self.planned.plan.placement.occupied_us == plan.placement.occupied_us:
            return []
        return [
            f"The simulated time leaves out what messages cost their ranks and gaps between ops, because a rehearsal "
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


def _difference(comparison: Comparison, device: str, width: int | None) -> str:
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
    lines = [fitted(f"  {what:<16}{us:>+12,} µs   ({why})", width, 36) for what, us, why in rows]
    return "\n".join([f"The difference of {comparison.difference_us:+,} µs is made up of:", *lines])


def _overhead_table(rehearsal: Rehearsal, width: int | None) -> str:
    """How late each rank was: an op's end is fixed by its earliest start, so only time after it delays others."""
    rows = [
        (f"  {o.rank}", f"{o.late_us:,}", f"{o.worst} (+{o.worst_us:,} µs)" if o.worst is not None else "-")
        for o in sorted(rehearsal.overheads, key=lambda o: -o.late_us)
    ]
    header = ("  rank", "late µs", "at worst")
    return _table("How late each rank was at its ops' ends:", header, rows, width, left=("at worst",))


def _link_table(rehearsal: Rehearsal, width: int | None) -> str:
    rows = [
        (
            f"  {link.sender}→{link.receiver}",
            f"{link.num_messages:,}",
            size_text(link.num_bytes),
            f"{link.planned_us:,}",
            f"{link.median_us:,}",
            _rate(link.planned_us, link.planned_bytes_per_us),
            _rate(link.median_us, link.bytes_per_us),
        )
        for link in sorted(rehearsal.links, key=lambda link: link.planned_us - link.median_us)
    ]
    header = ("  ranks", "messages", "bytes", "planned µs", "median µs", "planned MB/s", "real MB/s")
    title, optional = "What messages took, those furthest behind the plan first:", ("planned MB/s", "real MB/s")
    return _table(title, header, rows, width, optional=optional) if rows else ""


def _memory_table(rehearsal: Rehearsal, width: int | None) -> str:
    rows = [
        (
            f"  {m.rank}",
            size_text(m.planned_bytes),
            size_text(m.held_bytes),
            "unknown" if m.process_bytes is None else size_text(m.process_bytes),
        )
        for m in sorted(rehearsal.memory, key=lambda m: m.planned_bytes - (m.process_bytes or 0))
    ]
    header = ("  rank", "planned peak", "held by its ops", "process grew by")
    title = "Peak memory of each rank (planned: with messages; held by its ops: without):"
    return _table(title, header, rows, width) if rows else ""


def _rate(time_us: int, bytes_per_us: float) -> str:
    return f"{bytes_per_us:,.0f}" if time_us else "any"


def _table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    left: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> str:
    """The first rows under a title; the first column is aligned to the left."""
    more = [f"  … and {count_text(len(rows) - _MOST_ROWS, 'more row')}"] if len(rows) > _MOST_ROWS else []
    left = (header[0], *left)
    lines = table_lines(header, rows[:_MOST_ROWS], left=left, width=width, optional=optional)
    return "\n".join([fitted(title, width), *lines, *more])
