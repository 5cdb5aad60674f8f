"""One rank's torch.profiler trace, which may be hostile: read, checked, and only what is needed kept."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from rota.core.errors import FormatError
from rota.core.reading import LONGEST_NAME, open_file, read_bytes, short

LARGEST_BYTES = 1024**3  # of a trace, unpacked
_ALWAYS_BYTES, _LARGEST_RATIO = 64 * 1024**2, 100  # traces pack to about 1/20; no trace packs far better
_LARGEST_NS = 2**62  # some 146 years
_GZIP = b"\x1f\x8b"


class Event(NamedTuple):
    """A stretch of time on one thread, in ns of the clock that the trace was taken by."""

    name: str
    start_ns: int
    end_ns: int
    thread: tuple[str, str]


@dataclass(slots=True)
class RankTrace:
    """The events of one trace by kind, each list in order of start.

    `kernels` ran on an accelerator; each has the host's time of the call that launched it.
    """

    path: str
    rank: int | None
    world_size: int
    host: str
    annotations: list[Event] = field(default_factory=list)
    host_ops: list[Event] = field(default_factory=list)
    python_calls: list[Event] = field(default_factory=list)
    kernels: list[tuple[int, Event]] = field(default_factory=list)


def read_trace(path: str) -> RankTrace:
    """Read a trace, plain or gzip. Raises FormatError, which names the file, the error and its place."""
    document = _parse(path, _unpacked(path))
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise FormatError(f"{path}: not a trace of torch.profiler: it has no list of traceEvents (export_chrome_trace)")
    info = document.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    base_ns = document.get("baseTimeNanoseconds", 0)
    if not _is_whole(base_ns) or (rank is not None and not (_is_whole(rank) and rank >= 0)):
        raise FormatError(f"{path}: baseTimeNanoseconds or distributedInfo.rank is not a whole number of 0 or more")
    trace = RankTrace(path, rank, *_world(info, document.get("host_name")))
    _sort_in(trace, document["traceEvents"], base_ns)
    return trace


def _world(info: object, host: object) -> tuple[int, str]:
    """The number of processes, and the machine, if the trace has them."""
    world_size = info.get("world_size") if isinstance(info, dict) else None
    printable = isinstance(host, str) and len(host) <= LONGEST_NAME and host.isprintable()
    return world_size if _is_whole(world_size) else 1, str(host) if printable else ""


def _unpacked(path: str) -> bytearray:
    try:
        with open_file(path) as file:
            packed = file.read(2) == _GZIP
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            stream = gzip.GzipFile(fileobj=file) if packed else file
            most = min(LARGEST_BYTES, max(_ALWAYS_BYTES, _LARGEST_RATIO * size)) if packed else LARGEST_BYTES
            data = read_bytes(stream.read, most)
    except OSError as error:  # gzip.BadGzipFile is one
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise FormatError(f"{path}: cannot be unpacked: {error}") from None
    if len(data) > most:
        raise FormatError(f"{path}: more than {most} bytes unpacked; profile fewer steps, without stacks and shapes")
    return data


def _parse(path: str, data: bytearray) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise FormatError(f"{path}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise FormatError(f"{path}: not a trace: nested too deep") from None
    except ValueError as error:  # not UTF-8, or numbers of more digits than Python converts
        raise FormatError(f"{path}: not JSON that can be read: {error}") from None


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_NS


def _sort_in(trace: RankTrace, entries: list[Any], base_ns: int) -> None:
    launched_ns: dict[object, int] = {}
    kernels: list[tuple[object, Event]] = []
    for category, event, correlation in _events(trace.path, entries, base_ns):
        if category == "user_annotation":
            trace.annotations.append(event)
        elif category == "cpu_op":
            trace.host_ops.append(event)
        elif category == "python_function":
            trace.python_calls.append(event)
        elif category in ("cuda_runtime", "cuda_driver"):
            launched_ns[correlation] = event.start_ns
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append((correlation, event))
    trace.kernels = [(launched_ns[number], event) for number, event in kernels if number in launched_ns]
    trace.kernels.sort(key=lambda pair: pair[0])
    for events in (trace.annotations, trace.host_ops, trace.python_calls):
        events.sort(key=lambda event: (event.start_ns, -event.end_ns))


def _events(path: str, entries: list[Any], base_ns: int) -> Iterator[tuple[str, Event, object]]:
    """(category, event, correlation) of all events with a duration."""
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise FormatError(f"{path}: traceEvents[{i}] is not an object")
        category = entry.get("cat")
        if entry.get("ph") != "X" or not isinstance(category, str):
            continue
        name, start, duration = entry.get("name"), entry.get("ts"), entry.get("dur", 0)
        start_ns, duration_ns = _ns(start), _ns(duration)
        if not isinstance(name, str) or start_ns is None or duration_ns is None or duration_ns < 0:
            raise FormatError(f"{path}: traceEvents[{i}] needs a name, and ts and dur in µs; it is {short(entry)}")
        arguments = entry.get("args")
        correlation = arguments.get("correlation") if isinstance(arguments, dict) else None
        process, thread = entry.get("pid"), entry.get("tid")
        if any(isinstance(number, (list, dict)) for number in (correlation, process, thread)):
            raise FormatError(f"{path}: traceEvents[{i}] needs pid, tid and args.correlation that are numbers or texts")
        start_ns += base_ns
        yield category, Event(name, start_ns, start_ns + duration_ns, (str(process), str(thread))), correlation


def _ns(time_us: object) -> int | None:
    """A time in µs that a computer's clock can have, in ns."""
    if not isinstance(time_us, (int, float)) or isinstance(time_us, bool) or not abs(time_us) < _LARGEST_NS / 1000:
        return None  # also refuses NaN, which compares false to every number
    return round(time_us * 1000)
