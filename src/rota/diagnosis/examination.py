"""The whole examination: this machine as it is, then what ranks on it measure and compute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

from rota.diagnosis import host, nvidia_smi, software, variables
from rota.diagnosis.interconnects import Interconnect
from rota.diagnosis.report import SELF_TEST, Report, Section, joined, say
from rota.units import size_text

if TYPE_CHECKING:  # these import torch, which may be missing
    from rota.diagnosis.accelerators import Accelerators
    from rota.diagnosis.rank import Step
    from rota.diagnosis.sessions import Outcome

_QUICK_S, _FULL_S = 120.0, 3600.0
_MOST_RANKS = 4  # on the CPU, unless asked for
_HOST_SIZES = (1_000, 64_000, 1_000_000, 16_000_000)
_DEVICE_SIZES = (*_HOST_SIZES, 256_000_000)
_FULL_SIZES = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)
_ON_HOST = Interconnect("Gloo on the host, which has no rating")
_BETWEEN_HOSTS = Interconnect("unknown: only devices of one host are looked at")


@final
@dataclass(frozen=True, slots=True)
class Wanted:
    """What to examine.

    Attributes:
        num_ranks: Processes of the measurements and the self-test; None: one per device, or up to four on the CPU.
        self_test: Whether to run plans.
        full: Whether to run every schedule on 2 and more ranks, and messages of 1 kB to 64 MB.
        timeout_s: How long a rank may make no progress.
    """

    num_ranks: int | None = None
    self_test: bool = True
    full: bool = False
    timeout_s: float = 30.0


@final
class _Machine:
    """What can be said about this machine without other processes on it."""

    def __init__(self, num_ranks: int | None) -> None:
        self.driver = nvidia_smi.look()
        self.software = software.Software()
        self.accelerators = self._look_at_accelerators()
        self.host = host.look()
        self.variables = variables.set_variables()
        self.num_devices = 0 if self.accelerators is None else len(self.accelerators.devices)
        on_cpu = max(2, min(_MOST_RANKS, self.host.num_cores))
        self.num_ranks = num_ranks or self.num_devices or on_cpu

    def _look_at_accelerators(self) -> Accelerators | None:
        if self.software.torch is None:
            return None
        from rota.diagnosis import accelerators

        if not accelerators.is_built_for_any():
            return accelerators.look()
        say("asking PyTorch and the driver for devices")
        return accelerators.look_apart()

    @property
    def kind(self) -> str:
        """Of the ranks' devices."""
        return "cpu" if self.accelerators is None else self.accelerators.kind

    def sections(self, facts: dict[str, Any]) -> list[Section]:
        """The findings; what was read goes to `facts`."""
        facts["software"] = self.software.facts(self.driver)
        facts["host"] = asdict(self.host)
        facts["variables"] = self.variables
        facts["accelerators"] = [] if self.accelerators is None else self.accelerators.facts(self.driver)
        found = [
            software.judge(self.software, facts["software"], self.driver),
            host.judge(self.host, self.num_ranks, on_accelerators=bool(self.num_devices)),
            variables.judge(self.variables, on_accelerators=bool(self.num_devices)),
        ]
        if self.accelerators is not None:
            from rota.diagnosis import accelerators

            found.append(accelerators.judge(self.accelerators, self.driver, self.num_ranks, os.environ))
        return found

    def reason_against_ranks(self, sections: Sequence[Section]) -> str:
        """Why no ranks can be started; "" if they can."""
        if self.software.torch is None:
            return "there is no PyTorch"
        needed = ("host",) if self.kind == "cpu" else ("host", "accelerators")
        for finding in joined(sections):
            if finding.section in needed and finding.level == "problem":
                return f"first solve the problem above: {finding.section}, {finding.about}"
        return ""

    def connection(self, one: int, other: int) -> Interconnect:
        """The interconnect of the devices of two ranks on this machine."""
        if self.kind == "cpu":
            return _ON_HOST
        from rota.diagnosis import accelerators

        assert self.accelerators is not None
        return accelerators.interconnect(self.accelerators, self.driver, one, other)


def examine(wanted: Wanted) -> Report:
    """Examine this machine, with new processes on it."""
    machine = _Machine(wanted.num_ranks)
    facts: dict[str, Any] = {}
    sections = machine.sections(facts)
    if reason := machine.reason_against_ranks(sections):
        section = Section("ranks")
        section.skipped("links, clocks, self-test", reason)
        return Report(joined([*sections, section]), facts | _no_measurements())
    from rota.diagnosis.sessions import run_steps

    facts |= _no_measurements()
    targets = [(machine.kind, machine.num_ranks)]
    if machine.kind != "cpu" and machine.num_ranks == 1:
        targets.append(("cpu", 2))  # on one device there are no messages
    deadline_s = _deadline_s(wanted)
    for kind, num_ranks in targets:
        work, outcomes = _work(kind, num_ranks, wanted, machine.host.available_bytes)
        for size, steps in work.items():
            outcomes += run_steps(size, kind, steps, wanted.timeout_s, deadline_s)
        connection = machine.connection if kind == machine.kind else _on_host
        sections += _judged(outcomes, kind, num_ranks, connection, machine.host.max_files, facts)
    if not wanted.self_test:
        sections.append(_without_self_test())
    return Report(joined(sections), facts)


def examine_launched(wanted: Wanted) -> Report | None:
    """Examine the hosts of ranks that torchrun has started: all call it; the first returns the report, others None.

    What the report says about host and devices is about the first rank's host.
    """
    from rota.diagnosis.rank import Options, do_steps
    from rota.diagnosis.sessions import Outcome

    if os.environ["RANK"] != "0":
        do_steps(Options((), "", wanted.timeout_s, 0.0), lambda _, __: None, say)
        return None
    num_ranks = int(os.environ["WORLD_SIZE"])
    machine = _Machine(int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
    work, outcomes = _work(machine.kind, num_ranks, wanted, machine.host.available_bytes)
    steps = work[num_ranks]
    results: dict[int, Any] = {}
    options = Options(steps, machine.kind, wanted.timeout_s, _deadline_s(wanted))
    do_steps(options, lambda number, result: results.update({number: result}), say)
    facts: dict[str, Any] = {}
    sections = machine.sections(facts)
    facts |= _no_measurements()
    outcomes += [
        Outcome(step, results[i], was_begun=True) if i in results else Outcome(step, error="no time was left for it")
        for i, step in enumerate(steps)
    ]
    hosts = [rank["host"] for rank in results.get(0, [])]

    def connection(one: int, other: int) -> Interconnect:
        return machine.connection(one, other) if hosts[one] == hosts[other] == hosts[0] else _BETWEEN_HOSTS

    sections += _judged(outcomes, machine.kind, num_ranks, connection, machine.host.max_files, facts)
    if not wanted.self_test:
        sections.append(_without_self_test())
    return Report(joined(sections), facts)


def _no_measurements() -> dict[str, Any]:
    return {"ranks": [], "links": [], "clocks": [], "self_test": []}


def _deadline_s(wanted: Wanted) -> float:
    return time.monotonic() + (_FULL_S if wanted.full else _QUICK_S)


def _on_host(_: int, __: int) -> Interconnect:
    return _ON_HOST


def _without_self_test() -> Section:
    section = Section(SELF_TEST)
    section.skipped("plans", "--no-self-test was given")
    return section


# --- what ranks are to do ---------------------------------------------------------------------------------------------


def _work(
    kind: str, num_ranks: int, wanted: Wanted, available_bytes: int | None
) -> tuple[dict[int, list[Step]], list[Outcome]]:
    """The steps by number of processes, those of `num_ranks` first; and cases that do not fit into this host."""
    from rota.diagnosis.rank import Step
    from rota.diagnosis.self_test import Case, full_cases, quick_cases
    from rota.diagnosis.sessions import Outcome

    sizes = _HOST_SIZES if kind == "cpu" else _DEVICE_SIZES
    first = [Step("ranks", "the ranks")]
    if num_ranks > 1:
        sizes = tuple(sorted({*sizes, *(_FULL_SIZES if wanted.full else ())}))
        first += [Step("links", "messages between each pair of ranks", sizes), Step("clocks", "clocks")]
    found = {num_ranks: first}
    cases: list[Case] = []
    if wanted.self_test and wanted.full:
        for size in range(num_ranks, min(num_ranks, 2) - 1, -1):
            cases += full_cases(size, with_sizes=size in (2, num_ranks))
    elif wanted.self_test:
        cases = quick_cases(num_ranks)
        names = {case.family for case in cases}
        if num_ranks > 2:  # what needs an even number
            cases += [case for case in quick_cases(num_ranks - 1) if case.family not in names]
    too_large = []
    for case in cases:
        step = Step("case", f"self-test: {case}", case=case.to_fields())
        if available_bytes is not None and case.needed_bytes > available_bytes // 2:
            needed, there = size_text(case.needed_bytes), size_text(available_bytes)
            too_large.append(Outcome(step, error=f"it needs about {needed} of the host's memory, of {there} available"))
        else:
            found.setdefault(case.num_ranks, []).append(step)
    return found, too_large


# --- what they have found ---------------------------------------------------------------------------------------------


def _judged(
    outcomes: Sequence[Outcome],
    kind: str,
    num_ranks: int,
    connection: Callable[[int, int], Interconnect],
    max_files: int,
    facts: dict[str, Any],
) -> list[Section]:
    """The findings about one set of ranks; what they measured is added to `facts`."""
    from rota.diagnosis import judging

    on_host = kind == "cpu"
    where = "on the CPU" if on_host else f"on {kind}"
    links, tests = Section(f"links and clocks, {where}"), Section(f"{SELF_TEST}, {where}")
    for outcome in outcomes:
        match outcome.step.do:
            case "case":
                facts["self_test"].append({"on": kind, **judging.judge_case(tests, outcome)})
            case "links" if not outcome.error:
                of_links = judging.judge_links(links, outcome.result, num_ranks, connection, on_host)
                facts["links"] += [{"on": kind, **link} for link in of_links]
            case "clocks" if not outcome.error:
                judging.judge_clocks(links, outcome.result)
                facts["clocks"].append({"on": kind, **outcome.result})
            case "ranks" if not outcome.error:
                judging.judge_ranks(links, outcome.result)
                facts["ranks"] += [{"on": kind, **rank} for rank in outcome.result]
            case _:
                judging.judge_no_answer(links, outcome, on_host)
    if num_ranks == 1:
        links.skipped("messages, clocks", "there is one rank")
    judging.judge_files(tests, outcomes, max_files)
    return [links, tests]
