"""`rota check`."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any, NamedTuple

from rota import checking, simulation
from rota.cli import files, json_reports
from rota.cli.arguments import add_costs_of_csv, add_json
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.requirements import require, require_search
from rota.cli.screen import (
    print_replicas,
    print_snapshots,
    print_text,
    print_wire_effects,
    progress_line,
    report_columns,
)
from rota.costs import ASSUMED_COSTS
from rota.errors import PlanError
from rota.plan import Plan
from rota.programs import device_order, torch_order
from rota.programs.device_order import DeviceOrder
from rota.tables import fitted
from rota.timeline import Timeline
from rota.units import count_text

if TYPE_CHECKING:
    from rota.search import Bound

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
    parser.add_argument(
        "--bound", action="store_true", help="also prove how close the plan is to the optimum, by lower bounds"
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
        f"  {count_text(planned.num_ops, 'op')} of {count_text(planned.num_stages, 'stage')} and "
        f"{count_text(planned.num_microbatches, 'micro-batch', 'es')} on {count_text(planned.num_ranks, 'rank')}\n"
        f"  {_times(arguments, timeline)}"
    )
    print_wire_effects(planned, report_columns())
    print_snapshots(timeline)
    print_replicas(planned, "checked")
    if arguments.device:
        _print_proof(*_device_text(_on_devices(planned)))
    if arguments.torch:
        _print_torch(_on_torch(arguments.plan, planned))
    if arguments.bound:
        _print_bounds(_bounded(timeline))
    return 0


def _times(arguments: Namespace, timeline: Timeline) -> str:
    """The makespan and bubble; of a schedule CSV, which has no times, the makespan in units of a forward."""
    if not _assumes_times(arguments):
        return f"makespan {timeline.makespan_us:,} µs, bubble {timeline.bubble_fraction:.1%}"
    return (
        f"makespan {timeline.makespan_us / ASSUMED_COSTS['forward_us']:g} times a forward (F), if B takes twice as "
        f"long as F, and I and W each as long as F\n"
        f"  these times are assumed, because a schedule CSV has none; give your own with --costs costs.json"
    )


def _assumes_times(arguments: Namespace) -> bool:
    return files.is_csv(arguments.plan) and arguments.costs is None


def _fields(arguments: Namespace, planned: Plan, timeline: Timeline) -> dict[str, Any]:
    """What `--json` prints of a plan that is accepted; one that is not ends with an error, as always."""
    proved = _on_devices(planned) if arguments.device else None
    assumed = _assumes_times(arguments) and files.note_assumed_times("check", arguments.plan)
    fields: dict[str, Any] = {"accepted": True, "device_kernels": proved and proved.num_kernels}
    fields["times_assumed"] = assumed
    if arguments.torch:
        on_torch = _on_torch(arguments.plan, planned)
        fields |= {
            "torch_kernels": on_torch.proved.num_kernels,
            "torch_derives_messages": on_torch.derives,
            "torch_differs_from_plan": on_torch.differences,
            "torch_defer_pp_recv": on_torch.deferred,
        }
    if arguments.bound:
        fields["bounds"] = json_reports.of_bounds(_bounded(timeline))
    return fields | json_reports.of_timeline(timeline)


def _bounded(timeline: Timeline) -> list[tuple[str, int, list[Bound]]]:
    """For makespan and span: its name, the plan's value in µs, and the lower bounds, the highest first."""
    require_search()
    from rota.search import bounds_of

    plan, found = timeline.plan, []
    with progress_line() as show:
        for objective, value_us in (("makespan", timeline.makespan_us), ("span", timeline.span_us)):
            show(f"computing lower bounds on the {objective} …")
            found.append((objective, value_us, bounds_of(plan.placement, plan.num_microbatches, objective)))
    return found


def _print_bounds(found: list[tuple[str, int, list[Bound]]]) -> None:
    from rota.search import gap

    for objective, value_us, bounds in found:
        best = bounds[0].us
        proof = "proven optimal" if value_us <= best else f"within {gap(value_us, best):.2%} of the optimum"
        print(fitted(f"{objective} {value_us:,} µs, lower bound {best:,} µs: {proof}", report_columns()))
        highest = {one.name: one for one in reversed(bounds) if one.us}
        for one in sorted(highest.values(), key=lambda one: -one.us):
            print(fitted(f"  {one.us:>12,} µs  {one.name}: {one.why}", report_columns(), 19))


def _on_devices(planned: Plan) -> DeviceOrder:
    """What is proved of devices with streams. Raises PlanError if the step could hang there."""
    with progress_line() as show:
        show("proving that the step cannot hang on devices …")
        return device_order.check_device_order(planned)


class _OnTorch(NamedTuple):
    """What is proved of PyTorch's engine.

    `derives`: whether PyTorch derives the messages, instead of the CSV listing them. `differences`: where it then sends
    in another order than the plan. `deferred`: why `defer_pp_recv` must be off; "" if it may be on or is unknown.
    """

    proved: DeviceOrder
    derives: bool
    differences: str = ""
    deferred: str = ""


def _on_torch(path: str, planned: Plan) -> _OnTorch:
    """Raises PlanError if PyTorch's engine could hang."""
    text = files.text_of(path) if files.is_csv(path) else planned.to_csv()
    with files.named(path), progress_line() as show:
        show("proving that the step cannot hang on PyTorch's engine …")
        if torch_order.has_communication(text):
            return _OnTorch(torch_order.check_torch_order(text), derives=False)
        require("torch", "torch")
        from rota.interop.torch_order import derived

        by_torch, deferred = derived(text), ""
        proved = torch_order.check_torch_order(by_torch)
        try:
            torch_order.check_torch_order(derived(text, defers_receives=True))
        except PlanError as error:
            deferred = str(error)
        differences = torch_order.first_differences(by_torch, planned.to_csv(communication=True))
        return _OnTorch(proved, True, differences, deferred)


def _print_torch(found: _OnTorch) -> None:
    messages = "the messages that it derives" if found.derives else "the CSV's messages"
    _print_proof(*_torch_text(messages, found.proved))
    if found.differences:
        print_text(
            f"  PyTorch sends messages in a different order from the plan; makespan and --device refer to the plan's\n"
            f"  ({found.differences}); rota.interop.keep_order runs the plan's order"
        )
    if found.deferred:
        print_text(f"  defer_pp_recv=True could hang or swap messages; leave it off: {found.deferred}")


def _print_proof(proved: str, why: str) -> None:
    """Print what was proved, and why it is enough."""
    print_text(proved)
    print(fitted(f"  {why}", report_columns() or _PARAGRAPH_COLUMNS, 2))


def _torch_text(messages: str, proved: DeviceOrder) -> tuple[str, str]:
    return (
        f"on PyTorch's engine, with {messages}: {proved.num_kernels:,} kernels on "
        f"{count_text(proved.num_ranks, 'rank')} with {count_text(proved.num_channels, 'channel')} have no cycle of "
        f"waits",
        "This holds whether PyTorch makes one NCCL communicator per pair of ranks or one for all ranks, even if each "
        "send waits for its receive and each device runs kernels in the order of their launch.",
    )


def _device_text(proved: DeviceOrder) -> tuple[str, str]:
    met = f"{count_text(proved.num_channels, 'channel')} (one stream and communicator per directed pair of ranks)"
    if proved.num_collectives:
        met += f" and {count_text(proved.num_collectives, 'operation')} of several ranks"
    return (
        f"on devices with streams: {proved.num_kernels:,} kernels on {count_text(proved.num_ranks, 'rank')} with {met} "
        f"have no cycle of waits, and both sides of each communicator enqueue in the same order",
        "This holds even if each send waits for its receive and each device runs kernels only in the order of their "
        "launch. It is enough, because a kernel waits only for its stream, for events, for the other side of its "
        "message, and for kernels launched before it. "
        "NCCL requires operations to be submitted in the same order across ranks: "
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html",
    )


COMMAND = Command(
    "check",
    "prove that a plan is complete, cannot deadlock and fits in memory, and how close it is to the optimum",
    "rota check plan.json --bound",
    add_arguments,
    run,
)
