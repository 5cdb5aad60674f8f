"""What ranks have measured, as findings: ranks, links, clocks and the self-test."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rota.diagnosis.interconnects import SLOW, Interconnect
from rota.diagnosis.report import Section
from rota.diagnosis.self_test import TOLERANCE, Case
from rota.diagnosis.sessions import Outcome
from rota.units import count_text, size_text, time_text

_CLOCK_NS = 1_000_000  # more than a busy host answers late by
_MOST_LINES = 6  # for pairs that are alike
_FEW_FILES = 0.5  # of the limit
_NCCL_REMEDY = (
    "run again with NCCL_DEBUG=WARN, and with NCCL_P2P_DISABLE=1: if that helps, the path between the devices is at "
    "fault (IOMMU, PCIe ACS, virtual machine; see NCCL's troubleshooting page); otherwise look at /dev/shm and the "
    "driver"
)
_HOST_REMEDY = (
    "see above for the ranks' output; give a longer --timeout if the machine is busy; if a rank was killed, dmesg "
    "shows whether memory ran out"
)


def judge_ranks(section: Section, of_ranks: Sequence[dict[str, Any]]) -> None:
    """Whether the ranks are alike."""
    hosts = [*dict.fromkeys(rank["host"] for rank in of_ranks)]
    devices = [*dict.fromkeys(rank["device"] for rank in of_ranks)]
    section.ok("ranks", f"{count_text(len(of_ranks), 'process', 'es')} on {', '.join(hosts)}; {', '.join(devices)}")
    for name, what in (("python", "Python"), ("torch", "PyTorch")):
        versions = [*dict.fromkeys(rank[name] for rank in of_ranks)]
        if len(versions) > 1:
            section.warning(what, f"the ranks have different versions: {', '.join(versions)}", "install the same one")


# --- links ------------------------------------------------------------------------------------------------------------


class _Measured(NamedTuple):
    """One pair of ranks."""

    name: str
    rate: int  # bytes per second, of the fastest size
    latency_ns: int  # of the smallest message
    connected: Interconnect

    def to_text(self) -> str:
        """Rate against rating, and latency."""
        return f"{size_text(self.rate)}/s{_of_rating(self.connected)}, {_us(self.latency_ns)}"


def judge_links(
    section: Section,
    links: Sequence[dict[str, Any]],
    num_ranks: int,
    connection: Callable[[int, int], Interconnect],
    on_host: bool,
) -> list[dict[str, Any]]:
    """Which pairs are slower than their interconnect, or than others like them.

    Args:
        section: Gets the findings.
        links: As `measuring.links` returns them.
        num_ranks: The number of ranks.
        connection: The interconnect of two ranks.
        on_host: Whether messages are in the memory of the host.

    Returns:
        The links with rate, latency and interconnect, as JSON values.
    """
    facts: list[dict[str, Any]] = []
    alike: dict[Interconnect, list[_Measured]] = defaultdict(list)
    for link in links:
        a, b = link["ranks"]
        rates = [1e9 * size / max(ns, 1) for size, ns in zip(link["message_bytes"], link["one_way_ns"], strict=True)]
        measured = _Measured(f"{a}-{b}", round(max(rates)), link["one_way_ns"][0], connection(a, b))
        connected = measured.connected
        alike[connected].append(measured)
        told = {"name": connected.name, "bytes_per_s": connected.bytes_per_s, "source": connected.source}
        facts.append({**link, "latency_ns": measured.latency_ns, "bytes_per_s": measured.rate, "interconnect": told})
        if not link["intact"]:
            text = f"ranks {a} and {b}: bytes that were sent there and back have changed"
            section.problem(measured.name, text, "check memory and cables" if on_host else _NCCL_REMEDY)
    for connected, pairs in alike.items():
        _judge_alike(section, connected, pairs)
    if (left_out := math.comb(num_ranks, 2) - len(links)) > 0:
        section.skipped("other pairs", f"{left_out} pairs that are not neighbours: these would take minutes")
    return facts


def _judge_alike(section: Section, connected: Interconnect, pairs: list[_Measured]) -> None:
    """Pairs with the same interconnect: one line each, or one for all if they are many."""
    middle = statistics.median(pair.rate for pair in pairs)
    fine = []
    for pair in pairs:
        rating = connected.bytes_per_s
        if rating is not None and not connected.is_upper_bound and pair.rate < SLOW * rating:
            text = f"{pair.to_text()}, {connected.name}: less than {SLOW:.0%} of what it is rated for"
            section.warning(pair.name, text, _SLOW_REMEDY)
        elif pair.rate < SLOW * middle:
            text = (
                f"{pair.to_text()}, {connected.name}: less than {SLOW:.0%} of other pairs, {size_text(round(middle))}/s"
            )
            section.warning(
                pair.name, text, "measure again on an idle machine; if it is still slow, look at this pair's devices"
            )
        else:
            fine.append(pair)
    if len(fine) <= _MOST_LINES:
        for pair in fine:
            section.ok(pair.name, f"{pair.to_text()}, {connected.name}")
        return
    by_rate = sorted(fine, key=lambda pair: pair.rate)
    latencies = sorted(pair.latency_ns for pair in fine)
    slowest, fastest = by_rate[0], by_rate[-1]
    text = f"{size_text(slowest.rate)}/s ({slowest.name}) to {size_text(fastest.rate)}/s{_of_rating(connected)}, "
    text += f"{_us(latencies[0])} to {_us(latencies[-1])}, {connected.name}"
    section.ok(count_text(len(fine), "pair"), text)


def _of_rating(connected: Interconnect) -> str:
    if connected.bytes_per_s is None:
        return ""
    return f" of {'at most ' if connected.is_upper_bound else ''}{size_text(connected.bytes_per_s)}/s"


_SLOW_REMEDY = (
    "see whether variables above keep NCCL from using it; look at peer access, `nvidia-smi topo -m` and "
    "`nvidia-smi nvlink -s`; NCCL_DEBUG=INFO shows which path messages take"
)


def judge_no_answer(section: Section, outcome: Outcome, on_host: bool) -> None:
    """What ranks could not measure."""
    about = {"links": "messages"}.get(outcome.step.do, outcome.step.do)
    if outcome.was_begun:
        section.problem(about, outcome.error, _HOST_REMEDY if on_host else _NCCL_REMEDY)
    else:
        section.skipped(about, outcome.error)


# --- clocks -----------------------------------------------------------------------------------------------------------


def judge_clocks(section: Section, clocks: dict[str, Any]) -> None:
    """Whether the times of different ranks can be compared."""
    most, spread = max(map(abs, clocks["offsets_ns"])), max(clocks["spread_ns"])
    offsets = f"offsets of up to {_us(most)}, which vary by {_us(spread)}"
    if clocks["shared"]:
        text = f"all ranks share one; asked by messages, they see {offsets}"
        is_off, remedy = most > _CLOCK_NS, "close other programs: timelines are right, but ranks answer late"
    else:
        text = f"ranks on several hosts see {offsets} in a second; timelines correct the offsets"
        is_off, remedy = spread > _CLOCK_NS, "run chrony or PTP on all hosts: timelines of ranks are off by that much"
    if is_off:
        section.warning("clock", text, remedy)
    else:
        section.ok("clock", text)


# --- the self-test ----------------------------------------------------------------------------------------------------


def judge_case(section: Section, outcome: Outcome) -> dict[str, Any]:
    """Whether a plan gave the unsplit model's gradients. Returns it as a JSON object."""
    assert outcome.step.case is not None
    case = Case(**outcome.step.case)
    about = f"{case.family}, {count_text(case.num_ranks, 'rank')}"
    size = f"messages of {size_text(case.message_bytes)}"
    result = outcome.result or {}
    difference = result.get("difference", math.inf)
    if not outcome.was_begun:
        verdict = "skipped"
        section.skipped(about, f"{size}: {outcome.error}")
    elif outcome.error:
        verdict = "problem"
        section.problem(about, f"{size}: {outcome.error}", _HOST_REMEDY)
    elif not difference <= TOLERANCE:
        verdict = "problem"
        off = "missing or not finite" if math.isinf(difference) else f"off by {difference:.1e}"
        remedy = "do not train here: write this report with --json and send it to us, with the versions above"
        section.problem(about, f"{size}: losses or gradients are {off}, not the unsplit model's", remedy)
    else:
        verdict = "ok"
        step = time_text(round(result["step_ns"] / 1000))
        exact = "to the last bit" if not difference else f"within {difference:.0e}"
        what = "loss and gradients" if result["trains"] else "loss"
        section.ok(about, f"{what} as in the unsplit model, {exact}; a step takes {step}, {size}")
    fields = {**case.to_fields(), "message_bytes": case.message_bytes, "verdict": verdict, "error": outcome.error}
    known = {"difference": difference if math.isfinite(difference) else None, "step_ns": result.get("step_ns")}
    return {**fields, **known}


def judge_files(section: Section, outcomes: Sequence[Outcome], max_files: int) -> None:
    """Whether ranks came near the limit of open files."""
    counts = [outcome.result["open_files"] for outcome in outcomes if outcome.step.do == "case" and outcome.result]
    if not counts or not max(counts):
        return
    text = f"at most {max(counts)} files and sockets per rank"
    if 0 < max_files < max(counts) / _FEW_FILES:
        section.warning("open files", f"{text}, of {max_files}", "ulimit -n 4096: your data loaders need some, too")
    else:
        section.ok("open files", text)


def _us(time_ns: int) -> str:
    """Nanoseconds as text; below 10 µs with a decimal."""
    return time_text(round(time_ns / 1000)) if time_ns >= 10_000 else f"{time_ns / 1000:.1f} µs"
