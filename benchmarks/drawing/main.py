"""Drawing 64 ranks x 512 micro-batches (65,536 ops): picture, page, and how fast the page is in a browser."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import others
from timelines import one_f_one_b, with_jitter
from watching import Browser, Seen

from rota import Timeline
from rota.drawing import artists, save

REPEATS = 5
_ = artists  # imported before anything is timed


def main() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}")
    planned = one_f_one_b(64, 512)
    measured = with_jitter(planned, seed=1)
    with TemporaryDirectory() as folder, Browser() as browser:
        path = Path(folder)
        print(f"\n{planned.plan.num_ops:,} ops")
        print_row("PNG", [seconds(fresh(measured), path / "rota.png") for _ in range(REPEATS)], path / "rota.png")
        for name, timeline in (("simulated", planned), ("measured", measured)):
            file = path / f"{name}.html"
            print_row(f"page, {name}", [seconds(fresh(timeline), file) for _ in range(3)], file)
            print_seen([browser.look(file) for _ in range(REPEATS)])
        large = with_jitter(one_f_one_b(64, 2048), seed=1)
        print(f"\n{large.plan.num_ops:,} ops")
        print_row("page, measured", [seconds(large, path / "large.html")], path / "large.html")
        print_seen([browser.look(path / "large.html") for _ in range(3)])
        print(f"\nThe same {planned.plan.num_ops:,} ops with other tools, as their manuals show it")
        for name, write, watch in others.TOOLS:
            file = path / f"{name}.{'html' if watch else 'png'}"
            took = timed(lambda file=file, write=write: write(measured, file))
            print_row(name, [took], file)
            if watch:
                print_seen([browser.look(file, watch)])


def fresh(timeline: Timeline) -> Timeline:
    """The same, with nothing kept from an earlier drawing."""
    columns = (timeline.starts_us, timeline.ends_us, timeline.sent_us, timeline.arrived_us, timeline.step_ends_us)
    return Timeline(timeline.plan, *columns)


def seconds(timeline: Timeline, path: Path) -> tuple[float, float]:
    return timed(lambda: save(timeline, path))


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of the CPU: on a machine with other work only the latter says much."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s


def print_row(name: str, times_s: list[tuple[float, float]], path: Path) -> None:
    clock, cpu = zip(*times_s, strict=True)
    spread = f" ({min(clock):.2f} to {max(clock):.2f})" if len(clock) > 1 else ""
    size = f"{path.stat().st_size / 1e6:.2f} MB"
    print(f"{name:<28}{median(clock):6.2f} s{spread}, CPU {median(cpu):.2f} s, {size}", flush=True)


def print_seen(seen: list[Seen]) -> None:
    first = [each.first_ms for each in seen]
    frames = sorted(frame for each in seen for frame in each.frames_ms)
    p50, p99 = (frames[int(share * len(frames))] for share in (0.5, 0.99))
    print(f"{'':<28}first picture {median(first):.0f} ms ({min(first):.0f} to {max(first):.0f})")
    print(f"{'':<28}{len(frames)} frames while zooming: median {p50:.1f} ms, 99th percentile {p99:.1f} ms")
    print(f"{'':<28}CPU of the page's thread: {median(each.cpu_ms for each in seen):.1f} ms per frame", flush=True)


if __name__ == "__main__":
    main()
