"""The links between processes on this machine, measured when they are first asked for, and kept in a file."""

from __future__ import annotations

import math
import os
import platform
import re
import socket
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from rota.core import reading
from rota.core.cluster import Cluster, ClusterFile
from rota.core.errors import PipelineError, RotaError, UsageError
from rota.core.reading import Whole
from rota.core.text import count_text
from rota.core.writing import write_text
from rota.profiling.devices import cpu_name, device_name
from rota.profiling.forked import run_forked
from rota.profiling.links import REPEATS, MeasuredLinks, Report, links_of_launched
from rota.runtime.device.local import AUTO, device_type
from rota.runtime.environment import DEVICE, num_cores

_KEPT_S = 7 * 24 * 3600.0  # a machine's kernel, drivers and load change
_METHOD = "4"  # how links are measured; figures of another method are measured again
_MEASURING_S = 13.0  # until two processes or more have started, loaded torch and sent all messages
_FILE = "rota-links-{name}.json"
_TYPE = "links"


def links_of_this_machine(
    num_ranks: int,
    *,
    device: str = AUTO,
    cache: str | None = None,
    refresh: bool = False,
    repeats: int = REPEATS,
    report: Report = lambda _: None,
    within_s: float = math.inf,
) -> MeasuredLinks:
    """The links between `num_ranks` processes on this machine: measured by starting them, which takes seconds, or kept.

    If other programs used the machine meanwhile, what was measured is not kept, and `doubt` says so.

    Args:
        num_ranks: Number of processes.
        device: Where messages are: "cpu", the type of an accelerator, or "auto" for an accelerator if each process can
            have one, else the CPU.
        cache: A folder, or a file that ends in .json, that keeps what was measured for a week. It counts only for the
            same host, processor, number of cores, version of torch, type of device and number of processes. None: the
            user's cache folder, `$XDG_CACHE_HOME/rota` or `~/.cache/rota`.
        refresh: Whether to measure again what the cache has.
        repeats: See `measure_links`.
        report: Called with a line of text for what is being measured, or where the links were found.
        within_s: About how many seconds there are to measure them; links that are kept need no time.

    Returns:
        The `cluster` has no memory limits; that of one rank has no links.

    Raises:
        PipelineError: Links cannot be measured, or not in that time, or a cache that was named cannot be written.
    """
    if num_ranks < 2:
        return MeasuredLinks(Cluster.uniform(num_ranks), "one rank has no links")
    key = _key(num_ranks, device_type(device, num_ranks), repeats)
    path = _path(cache, key)
    if not refresh and (kept := _kept(path, key, report)) is not None:
        return kept
    if within_s < _MEASURING_S:
        raise PipelineError(
            f"this takes about {_MEASURING_S:.0f} s, once a week on a machine, and there was no time for it; give a "
            f"longer --time-limit once, or the output of `rota profile links --processes {num_ranks}` as --links"
        )
    links = links_of_started(num_ranks, device, repeats, report, within_s)
    if links.doubt:
        report(f"links are not kept: {links.doubt}")
    else:
        _keep(links, path, key, must=cache is not None)
    return links


def links_of_started(
    num_processes: int,
    device: str = AUTO,
    repeats: int = REPEATS,
    report: Report = lambda _: None,
    within_s: float = math.inf,
) -> MeasuredLinks:
    """The links of `num_processes` new processes on this machine, which are forked from this one.

    Args:
        num_processes: 2 or more.
        device: What each one has: "cpu", the type of an accelerator, or "auto", as `local_device` takes it.
        repeats: See `measure_links`.
        report: Called with a line of text at the start.
        within_s: Seconds after which the processes are ended.

    Raises:
        PipelineError: There are too few processes or devices, one fails, or there was too little time.
    """
    if num_processes < 2:
        raise PipelineError(f"num_processes is {num_processes}: a link needs 2")
    kind = device_type(device, num_processes)
    if dist.is_initialized():
        raise PipelineError(
            "this process is one of a process group, and cannot be forked; call rota.profiling.measure_links in all "
            "of them"
        )
    report(f"measuring the links between {num_processes} processes")

    def work(_: int) -> list[str]:
        os.environ[DEVICE] = kind
        links = links_of_launched(repeats)
        return [] if links is None else [links.cluster.to_json(), links.text, links.doubt]

    try:
        cluster, text, doubt = run_forked(num_processes, work, within_s=within_s)[0]
    except TimeoutError as error:
        raise PipelineError(f"the links were not measured in time: {error}; give a longer time limit") from None
    return MeasuredLinks(Cluster.from_json(cluster), text, doubt)


def _key(num_ranks: int, device: str, repeats: int) -> dict[str, str]:
    """What must not change for kept links to stay valid, by name."""
    name = cpu_name() if device == "cpu" else f"{device} {device_name(torch.device(device, 0))}"
    return {
        "method": _METHOD,
        "host": socket.gethostname(),
        "processor": name,
        "cores": str(num_cores()),
        "kernel": platform.release(),
        "torch": str(torch.__version__),
        "device": device,
        "ranks": str(num_ranks),
        "repeats": str(repeats),
    }


def _path(cache: str | None, key: dict[str, str]) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rota") if cache is None else Path(cache)
    if folder.suffix == ".json" and not folder.is_dir():
        return folder
    name = f"{key['host']}-{key['device']}-{key['ranks']}"
    return folder / _FILE.format(name=re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower())


def _kept(path: Path, key: dict[str, str], report: Report) -> MeasuredLinks | None:
    """What the file has for this key; None if nothing, or nothing new enough."""
    if not path.exists():
        return None
    try:
        kept = reading.parse(reading.read_text(path), _TYPE).read(_Kept)
        lines = "\n".join(map(reading.printable, kept.text))
        links, then = MeasuredLinks(Cluster.from_file(kept.cluster), lines), kept.key
    except RotaError as error:
        report(f"{path}: {error}; measuring again")
        return None
    age_s = time.time() - kept.measured_s
    then["ranks"] = str(links.cluster.num_ranks)  # whatever the key says
    differing = [f"{name} was {reading.short(then.get(name))}" for name, now in key.items() if then.get(name) != now]
    if differing:
        report(f"{path} has other links ({'; '.join(differing)}): measuring again")
        return None
    if not 0 <= age_s <= _KEPT_S:
        report(f"{path} is {count_text(int(age_s // 86400), 'day')} old: measuring again")
        return None
    report(f"links: from {path}, measured {count_text(int(age_s // 3600), 'hour')} ago")
    return links


class _Kept(msgspec.Struct):
    """Links in JSON, with the key and the time of their measurement."""

    key: dict[str, str]
    measured_s: Whole
    text: tuple[str, ...]
    cluster: ClusterFile


def _keep(links: MeasuredLinks, path: Path, key: dict[str, str], *, must: bool) -> None:
    """Write the file. Raises UsageError if that fails and `must` be."""
    kept = _Kept(key, int(time.time()), tuple(links.text.split("\n")), links.cluster.to_file())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, reading.dump(_TYPE, kept))
    except OSError as error:
        if must:
            raise UsageError(f"cannot write the links {path}: {error.strerror}; give another cache") from None
