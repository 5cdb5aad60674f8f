"""What each command takes: its arguments, their types and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rota.cli import checkpoints, planning
from rota.cli.sizes import parse_bytes, parse_link, parse_mesh
from rota.costs import ASSUMED_ACTIVATION_BYTES, ASSUMED_BACKWARD_US, ASSUMED_FORWARD_US
from rota.schedules import NAMED
from rota.shapes import SHAPES


def demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=_number(1), default=60, help="training steps (default: 60)")
    _output(parser, "FOLDER", "folder for its files (default: rota-demo)", default="rota-demo")


def plan(parser: argparse.ArgumentParser) -> None:
    choices = (planning.SEARCH, *NAMED)
    parser.add_argument("schedule", type=str.lower, choices=choices, metavar="SCHEDULE", help="one of those below")
    _step(parser)
    parser.add_argument("--stages", type=_number(1), help="stages, placed as the schedule wants (default: its least)")
    _costs(parser, "a stage")
    _shape(parser.add_argument_group("for search"))
    parser.add_argument("--objective", choices=("makespan", "span", "period"), help="for search: what is to be least")
    parser.add_argument(
        "--time-limit", type=_seconds, metavar="S", help="for search: at most this many seconds (default: 10)"
    )
    _output(parser, "FILE", "write the plan: .json, or .csv for PyTorch's form")
    width = max(map(len, NAMED))
    named = [f"{planning.SEARCH:<{width}}  the best order there is, for any placement, and how good it is"]
    named += [f"{name:<{width}}  {family.summary}" for name, family in NAMED.items()]
    parser.add_argument_group("schedules", "\n".join(named))


def autoplan(parser: argparse.ArgumentParser) -> None:
    told = "Python file with make_model(), make_batch(rows), loss_fn and, if need be, make_optimizer(parameters)"
    parser.add_argument("model", nargs="?", metavar="MODEL.py", help=told)
    parser.add_argument("--ranks", type=_number(1), required=True, help="processes that there are, in all")
    parser.add_argument("--batch", type=_number(1), required=True, help="rows of a step, over all replicas")
    parser.add_argument("--memory", type=_memory, help="of each rank, such as 40GB (default: no limit)")
    parser.add_argument("--profile", metavar="FILE", help="written by `rota profile`, in place of measuring")
    parser.add_argument("--device", help="estimate for this device, such as h100, in place of measuring")
    told = "of a micro-batch, to choose from, such as 1,2,4 (default: 1,2,4,8; of --profile all)"
    parser.add_argument("--rows", type=_rows, help=told)
    told = "between ranks: latency and rate, such as 5us,50GB/s (default: none and any)"
    parser.add_argument("--link", type=_link, default=(0, None), metavar="LINK", help=told)
    parser.add_argument("--node", type=_number(1), metavar="N", help="ranks of a node (default: all are on one)")
    told = "between nodes, such as 20us,12GB/s (default: as --link)"
    parser.add_argument("--node-link", type=_link, metavar="LINK", help=told)
    told = "measured by `rota profile links -o cluster.json`, in place of --link"
    parser.add_argument("--links", metavar="FILE", help=told)
    told = "for ranks that differ: what times are multiplied by on each, such as 1,1,1.5,1.5"
    parser.add_argument("--slowdowns", type=_slowdowns, default=(), metavar="X,…", help=told)
    parser.add_argument("--inference", action="store_true", help="forwards alone")
    told = "what `rota export` can say to other trainers: nothing is recomputed, and no stage is on two ranks"
    parser.add_argument("--exportable", action="store_true", help=told)
    told = "ranks of a pipeline, where that is decided; the others are replicas (default: the best)"
    parser.add_argument("--pipeline", type=_number(1), metavar="N", help=told)
    parser.add_argument(
        "--time-limit", type=_seconds, default=60.0, metavar="S", help="of the search, in seconds (default: 60)"
    )
    parser.add_argument("--cache", metavar="PATH", help="file or folder that keeps what was measured")
    parser.add_argument("--refresh", action="store_true", help="measure anew what the cache has")
    _output(parser, "FILE", "write the plan as JSON")


def bound(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="plan.json, or a schedule CSV (F 1 ms, B 2 ms)")


def frontier(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=_number(1), help="stages (default: as many as the shape needs)")
    _costs(parser, "a stage")
    _shape(parser, "v")
    parser.add_argument(
        "--time-limit", type=_seconds, default=60.0, metavar="S", help="at most this many seconds (default: 60)"
    )
    _output(parser, "PICTURE", "draw the curve as .png, .svg or .pdf")


def schedules(parser: argparse.ArgumentParser) -> None:
    _step(parser)
    _costs(parser, "a rank; families with several stages a rank deal it to them")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print CSV")


def check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="plan.json, or a schedule CSV")


def simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="plan.json, or a schedule CSV (F 1 ms, B 2 ms)")
    _output(parser, "FILE", "write the timeline as JSON")


def show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="plan.json (simulated first), timeline.json, or a schedule CSV")
    parser.add_argument("--width", type=_number(20), help="columns (default: the terminal's)")
    _output(parser, "PICTURE", "write a .png, .svg, .pdf or .html instead, or a .json for Perfetto")
    parser.add_argument("--above", metavar="FILE", help="for -o: a second one, over the first and aligned in time")
    parser.add_argument("--bound", action="store_true", help="for -o: tell how far the plan is from the best possible")


def profile(parser: argparse.ArgumentParser) -> None:
    told = "file that defines make_model, make_batch, loss_fn; or links, for how fast processes reach each other"
    parser.add_argument("model", metavar="MODEL.py", help=told)
    parser.add_argument("--rows", type=_rows, metavar="N,N,…", help="rows of a micro-batch (default: 1)")
    told = "cpu or cuda to measure there (default: cpu), or one to estimate for, such as h100: nothing is computed then"
    parser.add_argument("--device", metavar="NAME", help=told)
    told = "of each measurement, of which the median counts (default: 7)"
    parser.add_argument("--repeats", type=_number(1), metavar="N", help=told)
    parser.add_argument("--processes", type=_number(2), help="for links: to start on this machine (default: 2)")
    parser.add_argument("--cache", metavar="PATH", help="file or folder for which nothing is measured twice")
    parser.add_argument("--refresh", action="store_true", help="measure again what the cache has")
    _output(parser, "FILE", "write the profile, or the cluster, as JSON")


def rehearse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="plan.json")
    parser.add_argument("--steps", type=_number(1), default=5, help="steps, after one to warm up (default: 5)")
    parser.add_argument("--allocate", action="store_true", help="really hold the memory that the plan says")
    told = "end a rank that makes no progress for so long (default: 20 simulated steps, at least 60)"
    parser.add_argument("--timeout", type=_seconds, metavar="S", help=told)
    _output(parser, "FILE", "write the median step's timeline as JSON")


def run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="plan.json")
    parser.add_argument("script", help="Python file to run on every rank; it calls rota.given_plan()")
    # Before Python 3.13, argparse says of the rest that it is required.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the script").required = False
    parser.add_argument("--timeline", metavar="FILE", help="write the last step's measured timeline")
    _force(parser)
    told = "processes: pp ranks of the plan, times dp replicas (default: the plan's), times tp parts of each weight"
    parser.add_argument("--mesh", type=_mesh, default={}, metavar="pp=N,dp=N,tp=N", help=told)
    told = "when a rank fails, start all again, up to N times in a row without a newer checkpoint (default: 0)"
    parser.add_argument("--max-restarts", type=_number(0), default=0, metavar="N", help=told)
    told = "limit on no progress, where the script gives no timeout_s (default: 20 simulated steps, at least 60 s)"
    parser.add_argument("--timeout", type=_seconds, metavar="S", help=told)
    parser.add_argument("--engine", choices=["rota", "torch"], default="rota", help="torch: PyTorch's own, for chains")


def compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("planned", help="plan.json (simulated first) or timeline.json")
    parser.add_argument("measured", help="timeline.json, such as `rota run --timeline` writes")
    _cores(parser)
    _output(parser, "PICTURE", "draw both, as a .png, .svg, .pdf or .html, too")


def calibrate(parser: argparse.ArgumentParser) -> None:
    told = "measured timeline.json, such as `rota run --timeline` writes; of several the median counts"
    parser.add_argument("timelines", nargs="+", metavar="MEASURED", help=told)
    choices = (planning.SEARCH, *NAMED)
    told = "a schedule's name, or search for the best order (default: the fastest named one that fits)"
    parser.add_argument("--plan", dest="schedule", type=str.lower, choices=choices, metavar="NAME", help=told)
    told = "for --plan search: at most this many seconds (default: 10)"
    parser.add_argument("--time-limit", type=_seconds, metavar="S", help=told)
    parser.add_argument("--costs", metavar="FILE", help="write the measured costs as JSON, for `rota plan --costs`")
    _output(parser, "FILE", "write the better plan as JSON")


def explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("timeline", help="timeline.json, or a plan (simulated first)")
    parser.add_argument("second", nargs="?", help=argparse.SUPPRESS)  # none is wanted: told with the right command
    parser.add_argument(
        "--planned", metavar="FILE", help="what ops should take (default: what the timeline's plan says)"
    )
    _cores(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def import_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces", nargs="+", metavar="TRACE", help="of one rank, from torch.profiler; .json or .json.gz"
    )
    parser.add_argument("--step", type=_number(0), help="which of the profiled steps, from 0 (default: the last)")
    _cores(parser)
    _output(parser, "FILE", "write the timeline as JSON")


def checkpoint(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_argument_group("actions", checkpoints.HELP)
    actions.add_argument("action", choices=checkpoints.ACTIONS, metavar="ACTION", help="ls, verify or export")
    actions.add_argument(
        "folder", metavar="FOLDER", help="folder of rota.Checkpoints, or one checkpoint: FOLDER/step-N"
    )
    _output(parser, "FILE", "for export: model.safetensors")


def _number(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of {minimum} or more")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return seconds


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _memory(text: str) -> int:
    """Of a real machine, where a number alone is a forgotten unit."""
    size = _size(text)
    if text.strip()[-1].isdigit():
        raise argparse.ArgumentTypeError(f"{text} of what? write such as {text}GB, or {text}B for bytes")
    return size


def _link(text: str) -> tuple[int, int | None]:
    try:
        return parse_link(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rows(text: str) -> list[int]:
    return sorted({_number(1)(part.strip()) for part in text.split(",")})


def _slowdowns(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers, one a rank, such as 1,1,1.5,1.5") from None


def _mesh(text: str) -> dict[str, int]:
    try:
        return parse_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _shape(parser: argparse._ArgumentGroup | argparse.ArgumentParser, default: str | None = None) -> None:
    told = "; ".join(f"{name}: {shape.summary}" for name, shape in SHAPES.items())
    parser.add_argument(
        "--split-backward", action="store_true", help="halve the backward into I and W where the costs do not split it"
    )
    parser.add_argument("--shape", choices=SHAPES, default=default, help=f"placement (default: v); {told}")


def _step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--microbatches", type=_number(1), required=True, help="micro-batches a step")
    parser.add_argument("--limit", type=_size, help="memory of each rank, such as 40GB (default: none)")


def _costs(parser: argparse.ArgumentParser, of_what: str) -> None:
    parser.add_argument("--ranks", type=_number(1), help="processes (default: one a stage of --costs)")
    parser.add_argument("--costs", metavar="FILE", help="measured costs, written by Costs.to_json()")
    parser.add_argument("--forward-us", type=_number(0), help=f"F of {of_what} (default: {ASSUMED_FORWARD_US})")
    parser.add_argument(
        "--backward-us", type=_number(0), help=f"B, or I with --weight-us (default: {ASSUMED_BACKWARD_US})"
    )
    parser.add_argument("--weight-us", type=_number(0), help="W: splits the backward into I and W")
    told = f"kept by F until the backward (default: {ASSUMED_ACTIVATION_BYTES})"
    parser.add_argument("--activation", type=_size, dest="activation_bytes", help=told)
    parser.add_argument("--boundary", type=_size, dest="boundary_bytes", help="sent from stage to stage (default: 0)")
    parser.add_argument("--latency-us", type=_number(0), default=0, help="of every link (default: 0)")
    parser.add_argument("--bytes-per-us", type=_number(1), help="rate of every link; 1 GB/s is 1000 (default: any)")


def _output(parser: argparse.ArgumentParser, metavar: str, told: str, default: str | None = None) -> None:
    parser.add_argument("-o", "--output", metavar=metavar, default=default, help=told)
    _force(parser)


def _force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="write over what is there already")


def _cores(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cores", type=_number(1), help="of the one machine that all ranks share (default: enough)")
