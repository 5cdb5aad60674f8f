"""What was measured of messages between ranks: the cluster that follows from it, what cannot be true, and a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from rota.cluster import Cluster, Link, SharedLink
from rota.profiling.all_reduces import times_of
from rota.profiling.link_fits import Line, Sample, line_through, link_of_lines, rate_of_rounds
from rota.units import count_text, size_text, time_text

Pair = tuple[int, int]  # sender and receiver

FASTEST_BYTES_PER_US = 1_000_000  # 1 TB/s: no host copies faster
_ALIKE = 2.0  # by how much pairs of ranks of the same two hosts may differ and have one link
_COMPARED_BYTES = 1_000_000
_NOISE_US = 20.0  # of what a message costs a rank: the least that can be told from noise
_LEAST_SPREAD_US = 200.0  # differences that are short compared with this are no sign of a busy machine
_LEAST_SPREAD_OF_SUMS_US = 3000.0  # a sum's threads may have to wait for a core as long as Linux lets others keep it
_NO_COST = Line()


class HostRounds(NamedTuple):
    """All ranks of a host exchange messages with their neighbours at once, in rounds.

    `num_messages`: of a round. `num_sent`: by the rank with most neighbours. `rounds`: their times by size.
    """

    name: str
    ranks: tuple[int, ...]
    num_messages: int
    num_sent: int
    rounds: tuple[Sample, ...]

    @property
    def bytes_per_us(self) -> float:
        """All bytes of a round by its time, the median of all sizes."""
        return median(self.num_messages * num_bytes / us for num_bytes, us, *_ in self.rounds)


@dataclass(frozen=True)
class LinkMeasurements:
    """What was measured between processes, each of them a rank.

    Attributes:
        hosts: The host of each rank, as a number.
        hot: A small message directly after another one, by pair.
        paced: Messages alone on the wire, by pair: from a sender that has computed as long as an op does.
        asleep: Messages between neighbours where all ranks sleep instead of computing, from the end of a sleep on; the
            sender wakes up later.
        send: What a message costs its sender, by size, while all ranks compute.
        receive: What a message costs its receiver.
        shared: All neighbours at once, by host.
        gap: Time between two ops in the runtime's loop.
        all_reduces: Sums over ranks, by their number.
        ranks_per_core: How many ranks a core has at most: more than 1 on a host with fewer cores than ranks.
        busy: The part of the cores' time that other programs took; 0 if it is little.
    """

    hosts: tuple[int, ...]
    hot: Mapping[Pair, Sample]
    paced: Mapping[Pair, Sequence[Sample]]
    asleep: Mapping[Pair, Sequence[Sample]]
    send: Sequence[Sample]
    receive: Sequence[Sample]
    shared: Sequence[HostRounds]
    gap: Sample
    all_reduces: Mapping[int, Sequence[Sample]] = field(default_factory=dict)
    ranks_per_core: float = 1.0
    busy: float = 0.0

    # --- the cluster --------------------------------------------------------------------------------------------------

    def cluster(self, *, rehearsal: bool = False) -> Cluster:
        """The ranks with these links, without memory limits.

        Pairs of the same two hosts have one link, unless one takes more than twice as long as another.

        Args:
            rehearsal: For ranks that wait instead of computing (`rota rehearse`), so that messages take them no
                compute time, but reach the wire only when a sleeping process wakes up. They sum nothing.
        """
        send, receive = (_NO_COST, _NO_COST) if rehearsal else self.costs()
        both = Line(send.us + receive.us, send.us_per_byte + receive.us_per_byte)
        links = {
            pair: link_of_lines(line, send, receive)
            for pairs in self._pairs_by_hosts()
            for pair, line in _lines(self._samples_of(pairs, rehearsal), pairs).items()
        }
        rates = ((of, round(rate_of_rounds(of.rounds, of.num_messages, of.num_sent, both))) for of in self.shared)
        shared = (SharedLink(of.name, max(rate, 1), of.ranks, of.ranks) for of, rate in rates)
        gap_us = 0 if rehearsal else max(round(self.gap.us), 1)  # 0 would mean that it was not measured
        all_reduces = () if rehearsal else times_of(self.all_reduces)
        ordered = sorted(links.values(), key=lambda link: link.transfer_us(_COMPARED_BYTES))
        middle = max(ordered, key=ordered.count) if ordered else Link()
        others = tuple((*pair, link) for pair, link in sorted(links.items()) if link != middle)
        return Cluster((None,) * len(self.hosts), middle, others, tuple(shared), gap_us, all_reduces)

    def costs(self) -> tuple[Line, Line]:
        """What sending a message costs its rank, and receiving one."""
        send, receive = (
            line_through([(num_bytes, max(us, 0.0)) for num_bytes, us, *_ in of], _NOISE_US) if of else _NO_COST
            for of in (self.send, self.receive)
        )
        return send, receive

    def _pairs_by_hosts(self) -> Iterator[list[Pair]]:
        """For each host of a sender and of a receiver all pairs."""
        ranks = range(len(self.hosts))
        for hosts in sorted({(self.hosts[a], self.hosts[b]) for a in ranks for b in ranks if a != b}):
            pairs = [(a, b) for a in ranks for b in ranks if a != b and (self.hosts[a], self.hosts[b]) == hosts]
            yield pairs

    def _samples_of(self, pairs: list[Pair], rehearsal: bool) -> dict[Pair, Sequence[Sample]]:
        """Those of the pairs that were measured; if no two of them are neighbours, none of them slept."""
        slept = {pair: self.asleep[pair] for pair in pairs if pair in self.asleep} if rehearsal else {}
        return slept or {pair: self.paced[pair] for pair in pairs if pair in self.paced}

    # --- what cannot be -----------------------------------------------------------------------------------------------

    def implausible(self, most_spread: float) -> str:
        """What cannot be true, or is too uncertain to plan with, in words; "" if nothing.

        Args:
            most_spread: By how much the median of repeated measurements may be above their fastest quarter, as a part
                of that; 2 is three times as long.
        """
        for what, sample in self._times():
            if sample.us <= 0:
                return f"{what} took {sample.us:.1f} µs"
            if sample.num_bytes / sample.us > FASTEST_BYTES_PER_US:
                return f"{what} took {sample.us:.1f} µs, more than 1 TB/s"
        for what, sample, least_us in self._planned():
            if sample.us - sample.low_us > most_spread * max(sample.low_us, least_us):
                return f"{what} took {sample.us:.0f} µs, but {sample.low_us:.0f} µs or less in a quarter of the repeats"
        return ""

    def _times(self) -> Iterator[tuple[str, Sample]]:
        """Each sample of times with its name; times are never negative, as differences may be."""
        for (a, b), sample in self.hot.items():
            yield f"a small message from rank {a} to {b} after another one", sample
        yield from self._alone()
        yield from self._rounds()
        yield from self._sums()

    def _alone(self) -> Iterator[tuple[str, Sample]]:
        for how, of in (("computed", self.paced), ("slept", self.asleep)):
            for (a, b), samples in of.items():
                for sample in samples:
                    yield f"{size_text(sample.num_bytes)} from rank {a}, which had {how}, to rank {b}", sample

    def _of_links(self) -> Iterator[tuple[str, Sample]]:
        """Messages alone by size, of all pairs that have one link together: a link hardly depends on a single pair."""
        for how, of in (("computed", self.paced), ("slept", self.asleep)):
            for pairs in self._pairs_by_hosts():
                for (a, b), *others in _of_one_link({pair: of[pair] for pair in pairs if pair in of}):
                    more = f" or of {count_text(len(others), 'other pair')}" if others else ""
                    for samples in zip(*(of[pair] for pair in ((a, b), *others)), strict=True):
                        num_bytes, of_all = samples[0].num_bytes, [sample[1:] for sample in samples]
                        what = f"{size_text(num_bytes)} from rank {a}, which had {how}, to rank {b}{more}"
                        yield what, Sample(num_bytes, *map(median, zip(*of_all, strict=True)))

    def _rounds(self) -> Iterator[tuple[str, Sample]]:
        for host in self.shared:
            for sample in host.rounds:
                yield f"{size_text(sample.num_bytes)} between all neighbours of {host.name} at once", sample

    def _sums(self) -> Iterator[tuple[str, Sample]]:
        for number, samples in self.all_reduces.items():
            for sample in samples:
                yield f"an all-reduce of {size_text(sample.num_bytes)} by {number} ranks", sample

    def _planned(self) -> Iterator[tuple[str, Sample, float]]:
        """Each sample that plans depend on with its name, and the time to compare its spread with if it is shorter."""
        for what, sample in (*self._of_links(), *self._rounds()):
            yield what, sample, _LEAST_SPREAD_US
        for what, sample in self._sums():
            yield what, sample, _LEAST_SPREAD_OF_SUMS_US
        alone_us = {sample.num_bytes: sample.us for samples in self.paced.values() for sample in samples}
        for doing, samples in (("sending", self.send), ("receiving", self.receive)):
            for sample in samples:
                what = f"{doing} {size_text(sample.num_bytes)} beside computing"
                yield what, sample, max(alone_us.get(sample.num_bytes, 0.0), _LEAST_SPREAD_US)
        yield "the time between two ops", self.gap, _LEAST_SPREAD_US

    # --- in words -----------------------------------------------------------------------------------------------------

    def to_text(self) -> str:
        """A table with a row for each pair and host, what each column is, and what a reader must know."""
        lines = [_table(_PAIR_COLUMNS, [*self._pair_rows()])]
        if self.shared:
            lines.append(_table(_HOST_COLUMNS, [*self._host_rows()]))
        if self.send:
            sizes = [*self._cost_rows()]
            lines.append(_table(_COST_COLUMNS, sizes))
        if self.all_reduces:
            lines.append(_table(_SUM_COLUMNS, [*self._sum_rows()]))
        lines.append(f"{self.gap.us:.1f} µs between two ops, in the runtime's loop")
        return "\n\n".join(["\n".join(lines), "\n".join(self.notes())] if self.notes() else ["\n".join(lines)])

    @property
    def doubt(self) -> str:
        """Why these numbers may be wrong, and what to do; "" if nothing speaks against them."""
        if not self.busy:
            return ""
        return (
            f"other programs took {self.busy:.0%} of the cores' time during the measurement: end them, and measure "
            f"again"
        )

    def notes(self) -> list[str]:
        """What a reader must know about these numbers."""
        notes = []
        if self.ranks_per_core > 1:
            notes.append(
                f"{self.ranks_per_core:g} ranks share a core: what a message costs its ranks includes that it takes "
                f"the core away from others; it is valid only on this machine, with this number of ranks"
            )
        return [*notes, *filter(None, [self.doubt])]

    def _pair_rows(self) -> Iterator[tuple[str, ...]]:
        for (a, b), samples in sorted(self.paced.items()):
            line, slept = line_through([sample[:2] for sample in samples]), self.asleep.get((a, b))
            largest = samples[-1]
            yield (
                f"{a} → {b}",
                time_text(round(self.hot[a, b].us)),
                time_text(round(samples[0].us)),
                time_text(round(slept[0].us)) if slept else "",
                _rate_text(line.bytes_per_us),
                f"{size_text(largest.num_bytes)} {time_text(round(largest.us))}",
                f"{max(sample.spread for sample in samples):.0%}",
            )

    def _host_rows(self) -> Iterator[tuple[str, ...]]:
        for host in self.shared:
            spread = max(sample.spread for sample in host.rounds)
            neighbours = count_text(host.num_messages, "direction")
            yield host.name, neighbours, _rate_text(host.bytes_per_us), f"{spread:.0%}"

    def _cost_rows(self) -> Iterator[tuple[str, ...]]:
        for send, receive in zip(self.send, self.receive, strict=True):
            times = (f"{send.us:.0f} µs", f"{receive.us:.0f} µs")
            spreads = (f"{send.spread_us:.0f} µs", f"{receive.spread_us:.0f} µs")
            yield size_text(send.num_bytes), times[0], spreads[0], times[1], spreads[1]

    def _sum_rows(self) -> Iterator[tuple[str, ...]]:
        for number, samples in sorted(self.all_reduces.items()):
            for sample in samples:
                yield str(number), size_text(sample.num_bytes), time_text(round(sample.us)), f"{sample.spread:.0%}"


_PAIR_COLUMNS = (
    ("ranks", "sender and receiver"),
    ("hot", "a small message directly after another one"),
    ("paced", "a small message after the sender has computed for as long as an op, which is what a pipeline meets"),
    (
        "asleep",
        "a small message where all ranks sleep for 10 ms, from the end of the sleep; what a rehearsal meets",
    ),
    ("rate", "of messages that have the wire to themselves, from all sizes"),
    ("largest", "the largest message and its time, alone"),
    (
        "spread",
        "interquartile range of the repeats, as a share of their median; the worst size",
    ),
)
_HOST_COLUMNS = (
    ("host", "whose ranks exchange messages with all neighbours at once"),
    ("at once", "messages under way"),
    ("rate", "of all of these together: what they share serves one after another"),
    ("spread", "as above"),
)
_COST_COLUMNS = (
    ("message", "beside ranks that all compute"),
    ("sender", "how much longer the sender's ops take for each message"),
    ("±", "interquartile range of the repeats"),
    ("receiver", "how much longer the receiver's ops take for each message"),
    ("± ", "as above, of the receiver"),
)
_SUM_COLUMNS = (
    ("sum over", "ranks that reduce together, while groups of the other ranks do the same"),
    ("bytes", "of the sum"),
    ("time", "of an all-reduce"),
    ("spread", "as above"),
)


def _lines(samples: Mapping[Pair, Sequence[Sample]], pairs: list[Pair]) -> dict[Pair, Line]:
    """The line of each of the pairs; one that was not measured has that of all together."""
    lines = dict.fromkeys(pairs, _line(samples.values()))
    for group in _of_one_link(samples):
        lines |= dict.fromkeys(group, _line([samples[pair] for pair in group]))
    return lines


def _of_one_link(samples: Mapping[Pair, Sequence[Sample]]) -> list[list[Pair]]:
    """The pairs, all of them together, or each by itself if they differ."""
    times = [_line([of_pair]).at(_COMPARED_BYTES) for of_pair in samples.values()]
    if times and max(times) <= _ALIKE * min(times):
        return [[*samples]]
    return [[pair] for pair in samples]


def _line(samples: Iterable[Sequence[Sample]]) -> Line:
    return line_through([sample[:2] for of_pair in samples for sample in of_pair])


def _rate_text(bytes_per_us: float | None) -> str:
    return "any" if bytes_per_us is None else f"{size_text(round(bytes_per_us * 1_000_000))}/s"


def _table(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> str:
    """What each column is, line by line, and the rows."""
    names = [name for name, _ in columns]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    said = [f"  {name.strip():<8} {what}" for name, what in columns]
    return "\n".join([*("  ".join(map(str.ljust, row, widths)).rstrip() for row in (names, *rows)), *said, ""])
