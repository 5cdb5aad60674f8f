"""`rota check`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from rota import checking, simulation
from rota.cli import files, json_reports
from rota.cli.arguments import add_costs_of_csv, add_json
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_replicas, print_snapshots, print_text, print_wire_effects, report_columns
from rota.costs import ASSUMED_COSTS
from rota.errors import PlanError
from rota.plan import Plan
from rota.programs import device_order, torch_order
from rota.programs.device_order import DeviceOrder
from rota.tables import fitted
from rota.timeline import Timeline
from rota.units import count_text

_PARAGRAPH_COLUMNS = 112  # where the output is no terminal


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota check` to its parser."""
    parser.add_argument("plan", help="plan.json, or a schedule CSV in PyTorch's format")
    add_costs_of_csv(parser)
    add_json(parser)
    parser.add_argument(
        "--device",
        action="store_true",
        help="also prove that the step cannot hang on GPUs: no cycle of waits among the kernels, events and messages "
        "of all ranks",
    )
    parser.add_argument(
        "--torch",
        action="store_true",
        help="also prove that PyTorch's own pipeline engine cannot hang on GPUs when it runs this plan, with the "
        "communication that a schedule CSV lists or, if none is listed, the communication that PyTorch derives",
    )


def run(arguments: Namespace) -> int:
    """Check the plan, and print its size, makespan (µs) and bubble. Returns the exit code."""
    planned = files.read_plan(arguments.plan, arguments.costs)
    checking.check(planned)
    timeline = simulation.simulate(planned)
    if arguments.json:
        print_json(_fields(arguments, planned, timeline))
        return 0
    limits = planned.placement.cluster.limit_bytes
    fits = "fits in memory" if any(limit is not None for limit in limits) else "no memory limit is set"
    print_text(
        f"{arguments.plan}: complete, in order, cannot deadlock, {fits}\n"
        f"  {planned.num_ops:,} ops of {planned.num_stages} stages and {planned.num_microbatches} micro-batches on "
        f"{planned.num_ranks} ranks\n"
        f"  {_times(arguments, timeline)}"
    )
    print_wire_effects(planned, report_columns())
    print_snapshots(timeline)
    print_replicas(planned, "checked")
    if arguments.device:
        _print_proof(*_device_text(device_order.check_device_order(planned)))
    if arguments.torch:
        _check_torch(arguments.plan, planned)
    return 0


def _times(arguments: Namespace, timeline: Timeline) -> str:
    """The makespan and bubble; of a schedule CSV, which has no times, the makespan in units of a forward."""
    if not _assumes_times(arguments):
        return f"makespan {timeline.makespan_us:,} µs, bubble {timeline.bubble_fraction:.1%}"
    return (
        f"no times given; with B twice as long as F, and I and W as long as F: makespan "
        f"{timeline.makespan_us / ASSUMED_COSTS['forward_us']:g} F\n"
        f"  these times are assumed; --costs costs.json gives the costs of each stage"
    )


def _assumes_times(arguments: Namespace) -> bool:
    return files.is_csv(arguments.plan) and arguments.costs is None


def _fields(arguments: Namespace, planned: Plan, timeline: Timeline) -> dict[str, Any]:
    """What `--json` prints of a plan that is accepted; one that is not ends with an error, as always."""
    if arguments.torch:
        raise InputError("--torch prints text only; leave --json or --torch out")
    proved = device_order.check_device_order(planned) if arguments.device else None
    assumed = _assumes_times(arguments) and files.note_assumed_times("check", arguments.plan)
    fields = {"accepted": True, "device_kernels": proved and proved.num_kernels, "times_assumed": assumed}
    return fields | json_reports.of_timeline(timeline)


def _check_torch(path: str, planned: Plan) -> None:
    """Print what is proved of PyTorch's engine. Raises PlanError if it could hang."""
    text = files.text_of(path) if files.is_csv(path) else planned.to_csv()
    with files.named(path):
        if torch_order.has_communication(text):
            _print_proof(*_torch_text("the CSV's messages", torch_order.check_torch_order(text)))
            return
        require("torch", "torch")
        from rota.interop.torch_order import derived

        by_torch = derived(text)
        _print_proof(*_torch_text("the messages that it derives", torch_order.check_torch_order(by_torch)))
        if differences := torch_order.first_differences(by_torch, planned.to_csv(communication=True)):
            print_text(
                f"  PyTorch sends messages in another order than the plan; makespan and --device refer to the plan's\n"
                f"  ({differences}); rota.interop.keep_order runs the plan's order (docs/other-trainers.md)"
            )
        try:
            torch_order.check_torch_order(derived(text, defers_receives=True))
        except PlanError as error:
            print_text(f"  defer_pp_recv=True could hang or swap messages; leave it off: {error}")


def _print_proof(proved: str, why: str) -> None:
    """Print what was proved, and why it is enough."""
    print_text(proved)
    print(fitted(f"  {why}", report_columns() or _PARAGRAPH_COLUMNS, 2))


def _torch_text(messages: str, proved: DeviceOrder) -> tuple[str, str]:
    return (
        f"on PyTorch's engine, with {messages}: {proved.num_kernels:,} kernels on "
        f"{count_text(proved.num_ranks, 'rank')} with {count_text(proved.num_channels, 'channel')} wait in no cycle",
        "This holds whether PyTorch makes one NCCL communicator per pair of ranks or one for all ranks, even if each "
        "send waits for its receive, and if a device runs kernels in the order of their launch.",
    )


def _device_text(proved: DeviceOrder) -> tuple[str, str]:
    met = f"{count_text(proved.num_channels, 'channel')} (one stream and communicator per directed pair of ranks)"
    if proved.num_collectives:
        met += f" and {count_text(proved.num_collectives, 'operation')} of several ranks"
    return (
        f"on devices with streams: {proved.num_kernels:,} kernels on {count_text(proved.num_ranks, 'rank')} with {met} "
        f"wait in no cycle, and both sides of each communicator enqueue in the same order",
        "This holds even if each send waits for its receive, and if a device runs kernels only in the order of their "
        "launch. It is enough because a kernel waits only for its stream, events, its other side and the launch order. "
        "NCCL requires operations to be submitted in the same order across ranks: "
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html (docs/accelerators.md)",
    )


COMMAND = Command(
    "check",
    "prove that a plan is complete, cannot deadlock and fits in memory",
    "rota check plan.json",
    add_arguments,
    run,
)
