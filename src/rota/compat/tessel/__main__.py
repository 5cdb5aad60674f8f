"""`python -m rota.compat.tessel`: find the best schedule of one of Tessel's placements."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rota.compat.tessel.cases import PLACEMENTS
from rota.compat.tessel.schedule.composer import Composer
from rota.compat.tessel.schedule.schedplan import SchedPlan
from rota.core.errors import RotaError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 0; 1 if nothing fits; 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m rota.compat.tessel", description=__doc__)
    parser.add_argument("--placement", choices=sorted(PLACEMENTS), required=True)
    parser.add_argument("--ndevs", type=int, required=True, help="number of devices")
    parser.add_argument(
        "--nmicros", type=int, help="number of micro-batches; default: the fewest that the best repetend needs"
    )
    parser.add_argument("--memory", type=int, help="memory limit per device; default: no limit")
    parser.add_argument("--save", metavar="FILE", help="write the schedule as JSON")
    parser.add_argument("--infer", action="store_true", help="the placement's inference form, with no memory limit")
    parser.add_argument("--fast-search", action="store_true", help="choose the number of micro-batches as well")
    try:
        return _run(parser.parse_args(arguments))
    except (RotaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    micro = PLACEMENTS[options.placement](options.ndevs, train=not options.infer)
    memory = None if options.infer else options.memory
    print(f"placement:\n{micro}")
    schedule = Composer.compose_n(micro, memory, None if options.fast_search else options.nmicros)
    if schedule is None:
        print("no solution: nothing fits; give the devices more memory")
        return 1
    _print(schedule)
    if options.save is not None:
        schedule.save(options.save)
    return 0


def _print(schedule: SchedPlan) -> None:
    """Print the schedule, two micro-batches more of it, its memory, and the steps of its three phases."""
    nmicros = 1 + max(block.mid for block in schedule.all_blocks())
    unrolled = schedule.unroll(nmicros + 2)
    print(f"best schedule, {nmicros} micro-batches in {schedule.nsteps} steps:\n{schedule}")
    print(f"unrolled schedule, {nmicros + 2} micro-batches in {unrolled.nsteps} steps:\n{unrolled}")
    peaks = ", ".join(str(schedule.peak_memory(device)) for device in range(schedule.ndevs))
    print(f"peak memory per device: {peaks}")
    assert schedule.repetend is not None
    first, last = schedule.repetend
    repetend = f"{last - first} (again every {schedule.period})"
    print(f"steps: warmup {first}, repetend {repetend}, cooldown {schedule.nsteps - last}")


if __name__ == "__main__":
    sys.exit(main())
