"""The whole examination: the versions here, then what ranks on this machine find together.

PyTorch is imported here, and may be missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import platform
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from rota.core.errors import PipelineError
from rota.core.text import count_text, size_text, time_text
from rota.diagnosis.report import Finding, Report, say
from rota.runtime.device.known import KNOWN

#: In float64, relative to the largest element of each weight.
TOLERANCE = 1e-10

_MOST_RANKS = 4  # on the CPU, unless asked for
_MOST_LINES = 6  # for links
_FAILED = (
    "see above for the ranks' output; NCCL_DEBUG=WARN shows what NCCL says; if a rank was killed, `dmesg` says whether "
    "memory ran out"
)
_LIBRARIES = {name: version for known in KNOWN.values() for name, version in known.libraries.items()}
_WRONG = "do not train here: report it, with the versions above"


def examine(num_ranks: int | None = None) -> Report:
    """Examine this machine, with new processes on it.

    Args:
        num_ranks: How many. None: one per accelerator; without accelerators one per core, at least 2 and at most 4.
    """
    versions, error = find_versions()
    if error:
        return _report(versions, error, {}, "there is no PyTorch")
    from rota.diagnosis import rank
    from rota.runtime.launching.launch import EndedBySignal, launch
    from rota.runtime.launching.run_folder import run_folder

    num_ranks = num_ranks or _default_ranks()
    say(f"starting {count_text(num_ranks, 'process', 'es')}")
    failure = ""
    with run_folder("rota-doctor-") as folder:
        path = Path(folder.path, "results.jsonl")
        try:
            launch(rank.plan_of(num_ranks), rank.__file__, [str(path)], report=say)
        except EndedBySignal:
            raise
        except PipelineError as failed:
            failure = str(failed)
        lines = path.read_text().splitlines() if path.exists() else []
    return _report(versions, error, dict(json.loads(line) for line in lines), failure)


def examine_launched() -> Report | None:
    """Examine the hosts of ranks that torchrun has started: all call it; the first returns the report, others None."""
    from rota.diagnosis.rank import examine_together

    results: dict[str, Any] = {}
    examine_together(lambda name, result: results.update({name: result}))
    return _report(*find_versions(), results) if results else None


def _default_ranks() -> int:
    import torch

    from rota.runtime.device.local import AUTO, CPU, device_type
    from rota.runtime.environment import num_cores

    num_devices = torch.accelerator.device_count()
    if num_devices and device_type(AUTO, num_devices) != CPU:
        return num_devices
    return max(2, min(_MOST_RANKS, num_cores()))


def _report(versions: Mapping[str, str | None], error: str, results: Mapping[str, Any], failure: str = "") -> Report:
    """The report; `failure` says why not all `results` are there."""
    findings = _of_versions(versions, error)
    to_lines: dict[str, Callable[[Any], list[Finding]]] = {
        "ranks": _of_ranks,
        "links": _of_links,
        "self_test": _of_self_test,
    }
    was_tried = not error
    for name, lines in to_lines.items():
        about = name.replace("_", "-")
        if name in results:
            findings += lines(results[name])
        elif was_tried:
            findings.append(Finding("problem", about, failure, _FAILED))
            was_tried, failure = False, "not reached"
        else:
            findings.append(Finding("skipped", about, failure))
    difference = results.get("self_test")
    facts = {"software": dict(versions), "ranks": results.get("ranks", []), "links": results.get("links", [])}
    facts["self_test"] = None if difference is None else _judged(difference)
    return Report(tuple(findings), facts)


# --- versions ---------------------------------------------------------------------------------------------------------


def find_versions() -> tuple[dict[str, str | None], str]:
    """The versions by name, None where there is none; and why PyTorch cannot be imported, "" if it can."""
    versions = {"python": platform.python_version(), "rota": _installed("rota"), "torch": None}
    versions |= dict.fromkeys(map(str.lower, _LIBRARIES))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch: Any = importlib.import_module("torch")
    except Exception as error:  # a library that is missing raises OSError, a broken installation anything
        return versions, f"{type(error).__name__}: {error}"
    versions["torch"] = str(torch.__version__)
    for name, attribute in _LIBRARIES.items():
        with suppress(Exception):  # builds without it raise various errors
            version = attrgetter(attribute)(torch)
            versions[name.lower()] = ".".join(map(str, version())) if callable(version) else version
    return versions, ""


def _of_versions(versions: Mapping[str, str | None], error: str) -> list[Finding]:
    lines = [
        Finding("ok", "Python", f"{versions['python']}"),
        Finding("ok", "Rota", versions["rota"] or "not installed, but run from its sources"),
    ]
    if error:
        lines.append(
            Finding("problem", "PyTorch", f"it cannot be imported: {error}", "install it: pip install 'rota[torch]'")
        )
    else:
        tested = _tested_versions()
        lines.append(Finding("ok", "PyTorch", f"{versions['torch']}{tested and f' (Rota is made for {tested})'}"))
    lines += [Finding("ok", name, versions[name.lower()] or "") for name in _LIBRARIES if versions[name.lower()]]
    return lines


def _installed(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _tested_versions() -> str:
    """The versions of PyTorch that Rota's package asks for, such as ">=2.10,<2.16"; "" if it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("rota") or ():
            if match := re.match(r"torch\b(?!-)\s*\(?([<>=!~\d.,\s]+)", requirement):
                return match[1].strip()
    return ""


# --- what ranks found -------------------------------------------------------------------------------------------------


def _of_ranks(ranks: list[dict[str, Any]]) -> list[Finding]:
    is_one_host = len({rank["host"] for rank in ranks}) == 1
    lines = []
    for number, rank in enumerate(ranks):
        words = [rank["device"], rank["name"], "" if is_one_host else rank["host"]]
        if rank["total_bytes"] is not None:
            words.append(f"{size_text(rank['free_bytes'])} of {size_text(rank['total_bytes'])} free")
        lines.append(Finding("ok", f"rank {number}", ", ".join(filter(None, words))))
    return lines


def _of_links(links: list[dict[str, Any]]) -> list[Finding]:
    """A line per link, or one for all if they are many."""
    if not links:
        return [Finding("skipped", "links", "there is one rank")]
    if len(links) <= _MOST_LINES:
        return [Finding("ok", f"link {_name(link)}", f"{_rate(link)}, {_latency(link)}") for link in links]
    by_rate = sorted(links, key=lambda link: int(link["bytes_per_s"]))
    by_latency = sorted(links, key=lambda link: int(link["latency_ns"]))
    rates = f"{_rate(by_rate[0])} ({_name(by_rate[0])}) to {_rate(by_rate[-1])} ({_name(by_rate[-1])})"
    latencies = f"{_latency(by_latency[0])} to {_latency(by_latency[-1])}"
    return [Finding("ok", f"{len(links)} links", f"{rates}, {latencies}")]


def _name(link: dict[str, Any]) -> str:
    return "-".join(map(str, link["ranks"]))


def _rate(link: dict[str, Any]) -> str:
    return f"{size_text(link['bytes_per_s'])}/s"


def _latency(link: dict[str, Any]) -> str:
    return time_text(max(round(link["latency_ns"] / 1000), 1))


def _of_self_test(difference: float) -> list[Finding]:
    judged = _judged(difference)
    if judged["exact"]:
        text = f"training gives the losses and weights of the unsplit model, within {difference:.0e}"
        return [Finding("ok", "self-test", text)]
    off = "not finite" if judged["difference"] is None else f"off by {difference:.1e}"
    return [Finding("problem", "self-test", f"losses or weights are {off}, not the unsplit model's", _WRONG)]


def _judged(difference: float) -> dict[str, Any]:
    return {"exact": difference <= TOLERANCE, "difference": difference if math.isfinite(difference) else None}
