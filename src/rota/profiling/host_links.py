"""All that is measured of messages between CPUs, in order, and again where it cannot be true or the machine is busy."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rota.errors import PipelineError
from rota.profiling import occupancy
from rota.profiling.all_reduces import measure_all_reduces
from rota.profiling.host_messages import ROUND_SIZES, Wire, messages_of_sleepers, rounds, samples_of_pair
from rota.profiling.link_fits import Sample, sample_of
from rota.profiling.link_measurements import HostRounds, LinkMeasurements, Pair
from rota.runtime.environment import num_cores
from rota.runtime.json_messages import all_gather_json
from rota.units import count_text

REPEATS = 7
MOST_SPREAD = 2.0  # see `LinkMeasurements.implausible`
_BUSY = 0.15  # of the cores' time: others that take more make measurements worthless
_TRIES = 3
_REST_S = 1.0  # before a busy machine is measured again
_MOST_PAIRS = 6  # of two hosts: those between neighbours first

Report = Callable[[str], None]


def measure_hosts(repeats: int, most_spread: float, report: Report, within_s: float = math.inf) -> LinkMeasurements:
    """Measure messages between all processes of the default group, which are on CPUs. Collective.

    Args:
        repeats: Number of messages of each size, of which the median counts.
        most_spread: See `LinkMeasurements.implausible`.
        report: Called with a line for each thing that is measured.
        within_s: Seconds after which nothing is measured again.

    Returns:
        The same on all processes. If other programs use the machine, it says how much.

    Raises:
        PipelineError: What is measured cannot be true or varies too much, also when it is measured again.
    """
    with Wire() as wire:
        names = all_gather_json(host_name())
        hosts = tuple(names.index(name) for name in names)
        wrong, began_s = "", time.monotonic()
        for number in range(1, _TRIES + 1):
            found = _measured(wire, hosts, repeats, report)
            wrong = found.implausible(most_spread)
            # All processes decide alike, by the clock of the first, before they begin what takes as long again.
            took_s = all_gather_json(time.monotonic() - began_s)[0]
            is_last = number == _TRIES or took_s * (number + 1) / number > within_s
            if not wrong and (found.busy <= _BUSY or is_last):
                return found
            if is_last:
                break
            report(f"{wrong or f'other programs took {found.busy:.0%} of the cores'}: measuring again")
            time.sleep(_REST_S)
    others = f" (other programs took {found.busy:.0%} of the cores' time)" if found.busy else ""
    tries = f", {number} times in a row" if number > 1 else ""
    raise PipelineError(
        f"links cannot be measured: {wrong}{others}{tries}; end what else uses this machine, start fewer processes, or "
        f"repeat more often (--repeats {3 * repeats})"
    )


def _measured(wire: Wire, hosts: tuple[int, ...], repeats: int, report: Report) -> LinkMeasurements:
    work, cores = occupancy.Work(occupancy.WORK_US), all_gather_json(num_cores())
    here = [rank for rank in range(wire.num_ranks) if hosts[rank] == hosts[wire.rank]]
    ranks_per_core = max(hosts.count(host) / cores[host] for host in {*hosts})
    shares = [all_gather_json(occupancy.processor_share(wire, work))]
    report(f"messages between {count_text(wire.num_ranks, 'rank')}, one pair at a time")
    by_pair = _pairs_alone(wire, hosts, repeats)
    report("messages between neighbours that sleep")
    slept = _by_pair(messages_of_sleepers(wire, 2 * repeats), hosts)
    report("messages between all neighbours at once")
    shared = [*_rounds(wire, hosts, here, repeats)]
    report("what messages cost ranks that compute")
    send, receive = _costs(wire, work, max(2 * repeats // 3, 2), ranks_per_core)
    report("sums over ranks")
    all_reduces = measure_all_reduces(repeats) if wire.num_ranks > 1 else {}
    report("the time between two ops")
    gaps = [us for of in all_gather_json(occupancy.gaps_between_ops(repeats)) for us in of]
    shares.append(all_gather_json(occupancy.processor_share(wire, work)))
    busy = max(_taken_by_others(hosts, cores, of) for of in shares)
    return LinkMeasurements(
        hosts=hosts,
        hot={pair: of["hot"][0] for pair, of in by_pair.items()},
        paced={pair: of["paced"] for pair, of in by_pair.items()},
        asleep={pair: of["asleep"] for pair, of in slept.items()},
        send=send,
        receive=receive,
        shared=shared,
        gap=sample_of(0, gaps),
        all_reduces=all_reduces,
        ranks_per_core=max(ranks_per_core, 1.0),
        busy=busy if busy > _BUSY else 0.0,
    )


def _taken_by_others(hosts: Sequence[int], cores: Sequence[int], shares: Sequence[float]) -> float:
    """The part of the cores' time that other programs took while all ranks computed, of the busiest host.

    `shares`: what each rank's thread got of a core. Ranks that share cores get all of them together.
    """
    found = 0.0
    for host in {*hosts}:
        got = [share for share, of in zip(shares, hosts, strict=True) if of == host]
        found = max(found, 1 - sum(got) / min(len(got), cores[host]))
    return found


def host_name() -> str:
    """Tells hosts apart, also those of one name: the name, and the identity of the running kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}".strip()


# --- one pair at a time -----------------------------------------------------------------------------------------------


def pairs_of(hosts: Sequence[int]) -> Iterator[Pair]:
    """The pairs of ranks, the lower one first, that are measured: some of each two hosts, neighbours first."""
    ranks = range(len(hosts))
    by_distance = sorted(((a, b) for b in ranks for a in range(b)), key=lambda pair: (pair[1] - pair[0], pair))
    num_of: dict[frozenset[int], int] = {}
    for a, b in by_distance:
        of = frozenset((hosts[a], hosts[b]))
        num_of[of] = num_of.get(of, 0) + 1
        if num_of[of] <= _MOST_PAIRS:
            yield a, b


def _pairs_alone(wire: Wire, hosts: Sequence[int], repeats: int) -> dict[Pair, dict[str, list[Sample]]]:
    """Samples of each direction, by what the sender did before."""
    mine: dict[str, Any] = {}
    pairs = [*pairs_of(hosts)]
    if len(pairs) > 1:  # most of them have one link, which is that of all their times together
        repeats = max(2 * repeats // 3, 2)
    for a, b in pairs:
        wire.wait_for_all()  # nothing else travels
        if wire.rank in (a, b):
            mine |= samples_of_pair(wire, a, b, repeats)
    return _by_pair(mine, hosts)


def _by_pair(mine: dict[str, Any], hosts: Sequence[int]) -> dict[Pair, dict[str, list[Sample]]]:
    """All that was received on any process. Collective."""
    times: dict[Pair, Any] = {}
    for received in all_gather_json(mine):
        for name, of_kinds in received.items():
            sender, receiver = map(int, name.split())
            times[sender, receiver] = of_kinds
    return {
        (a, b): {
            kind: [
                sample_of(size, us if hosts[a] == hosts[b] else _half_of_both(us, others))
                for (size, *us), (_, *others) in zip(sizes, times[b, a][kind], strict=True)
            ]
            for kind, sizes in of_kinds.items()
        }
        for (a, b), of_kinds in times.items()
    }


def _half_of_both(there_us: Sequence[float], back_us: Sequence[float]) -> list[float]:
    """Times of one direction between hosts, whose clocks may be apart: one gains as much by it as the other loses."""
    return [(there + back) / 2 for there, back in zip(there_us, back_us, strict=True)]


# --- together ---------------------------------------------------------------------------------------------------------


def _rounds(wire: Wire, hosts: Sequence[int], here: list[int], repeats: int) -> Iterator[HostRounds]:
    """All neighbours at once on each host with two ranks or more."""
    at = here.index(wire.rank)
    times = all_gather_json(rounds(wire, [*here[max(at - 1, 0) : at], *here[at + 1 : at + 2]], repeats))
    names = all_gather_json(socket.gethostname())
    for host in sorted({*hosts}):
        ranks = tuple(rank for rank, of in enumerate(hosts) if of == host)
        if len(ranks) > 1:
            samples = (
                sample_of(size, [max(of) for of in zip(*(times[rank][i] for rank in ranks), strict=True)])
                for i, size in enumerate(ROUND_SIZES)
            )
            yield HostRounds(
                f"host {names[ranks[0]]}", ranks, 2 * (len(ranks) - 1), min(len(ranks) - 1, 2), tuple(samples)
            )


def _costs(wire: Wire, work: occupancy.Work, repeats: int, ranks_per_core: float) -> tuple[list[Sample], list[Sample]]:
    """What messages cost senders and receivers, of all ranks in both roles."""
    by_processor = ranks_per_core > 1
    first = [(a, a + 1) for a in range(0, wire.num_ranks - 1, 2)]
    found: dict[str, list[list[float]]] = {"send": [], "receive": []}
    for pairs in (first, [pair[::-1] for pair in first]):
        for of_rank in all_gather_json(occupancy.costs_beside_work(wire, work, pairs, repeats, by_processor)):
            for role, sizes in of_rank.items():
                found[role] = [[*a, *b] for a, b in zip(found[role] or [[]] * len(sizes), sizes, strict=True)]
    scale = ranks_per_core if by_processor else 1.0
    send, receive = (
        [
            sample_of(size, [scale * us for us in of]) for size, of in zip(occupancy.SIZES, found[role], strict=False)
        ]  # none of one rank only
        for role in ("send", "receive")
    )
    return send, receive
