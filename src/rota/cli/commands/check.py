"""`rota check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from rota.cli import common, files, reports
from rota.cli.command import Options, Value, command
from rota.cli.reports import print_json
from rota.cli.requirements import require, require_search
from rota.cli.screen import print_text, print_transfers, progress_line, report_columns
from rota.core import simulation
from rota.core.costs import ASSUMED_COSTS
from rota.core.errors import PlanError
from rota.core.plan import Plan
from rota.core.programs import device_order, torch_order
from rota.core.programs.device_order import DeviceOrder
from rota.core.programs.occupancy import MostCtas, most_ctas, num_slots
from rota.core.text import count_text, fitted
from rota.core.timeline import Timeline

if TYPE_CHECKING:
    from rota.search import Bound

_PARAGRAPH_COLUMNS = 112  # where the output is no terminal


def _parse_multiprocessors(text: str) -> int:
    """Return a number: "132" -> 132, "h100" -> 132."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    require("torch", "torch")
    from rota.profiling import DEVICES

    known = {name: device.num_multiprocessors for name, device in DEVICES.items() if device.num_multiprocessors}
    if text.lower() not in known:
        raise ValueError(f"{text!r} is neither a number of multiprocessors nor one of {', '.join(known)}")
    return known[text.lower()]


@command("rota check plan.json --bound")
@common.argument("plan", help="plan.json, or a schedule CSV in PyTorch's format")
@common.costs_of_csv
@common.json
@common.flag(
    "--device",
    help="also prove that the step cannot hang on GPUs: no cycle of waits among the kernels, events and messages of "
    "all ranks",
)
@click.option(
    "--sms",
    type=Value("multiprocessors", _parse_multiprocessors),
    metavar="N",
    help="as --device, for devices with N multiprocessors, or those of a device such as h100: also prove that no order "
    "in which a device serves its streams can hang, and say how many CTAs a kernel of NCCL may have for that (default: "
    "room on devices is not checked)",
)
@common.flag(
    "--torch",
    help="also prove that PyTorch's own pipeline engine cannot hang on GPUs when it runs this plan, with the "
    "communication that a schedule CSV lists or, if none is listed, the communication that PyTorch derives",
)
@common.flag("--bound", help="also prove how close the plan is to the optimum, by lower bounds")
def check(options: Options) -> None:
    """Prove that a plan is complete, cannot deadlock and fits in memory, and how close it is to the optimum."""
    loaded = files.read_plan_or_timeline(options.plan, options.costs)
    planned = loaded.plan if isinstance(loaded, Timeline) else loaded
    simulation.check(planned)
    timeline = simulation.simulate(planned)
    if options.json:
        print_json(_fields(options, planned, timeline))
        return
    limits = planned.placement.cluster.limit_bytes
    fits = "fits in memory" if any(limit is not None for limit in limits) else "no memory limit is set"
    print_text(
        f"{options.plan}: complete, in order, cannot deadlock, {fits}\n"
        f"  {count_text(planned.num_ops, 'op')} of {count_text(planned.num_stages, 'stage')} and "
        f"{count_text(planned.num_microbatches, 'micro-batch', 'es')} on {count_text(planned.num_ranks, 'rank')}\n"
        f"  {_times(options, timeline)}"
    )
    if isinstance(loaded, Timeline) and loaded != timeline:
        print_text(f"  these are the plan's figures; the measured step took {loaded.makespan_us:,} µs")
    print_transfers(planned)
    if planned.num_replicas > 1:
        print_text(f"This checked one of {planned.num_replicas} replicas: all of them run the same pipeline.")
    if options.device or options.sms:
        _print_devices(_on_devices(planned), _most_ctas(options, planned))
    if options.torch:
        _print_torch(_on_torch(options.plan, planned))
    if options.bound:
        _print_bounds(_bounded(timeline))


def _times(options: Options, timeline: Timeline) -> str:
    """The makespan and bubble; of a schedule CSV, which has no times, the makespan in units of a forward."""
    if not _assumes_times(options):
        return f"makespan {timeline.makespan_us:,} µs, bubble {timeline.bubble_fraction:.1%}"
    return (
        f"makespan {timeline.makespan_us / ASSUMED_COSTS['forward_us']:g} times a forward (F), if B takes twice as "
        f"long as F, and I and W each as long as F\n"
        f"  these times are assumed, because a schedule CSV has none; give your own with --costs costs.json"
    )


def _assumes_times(options: Options) -> bool:
    return files.is_csv(options.plan) and options.costs is None


def _fields(options: Options, planned: Plan, timeline: Timeline) -> dict[str, Any]:
    """What `--json` prints of a plan that is accepted; one that is not ends with an error, as always."""
    proved = _on_devices(planned) if options.device or options.sms else None
    assumed = _assumes_times(options) and files.note_assumed_times("check", options.plan)
    kernels = proved and proved.num_kernels
    fields: dict[str, Any] = {"accepted": True, "device_kernels": kernels, "times_assumed": assumed}
    if proved is not None:
        most = _most_ctas(options, planned)
        fields |= {"device_slots": proved.num_slots, "device_most_ctas": most and most.everywhere}
    if options.torch:
        on_torch = _on_torch(options.plan, planned)
        fields |= {
            "torch_kernels": on_torch.proved.num_kernels,
            "torch_derives_messages": on_torch.derives,
            "torch_differs_from_plan": on_torch.differences,
            "torch_defer_pp_recv": on_torch.deferred,
        }
    if options.bound:
        fields["bounds"] = reports.of_bounds(_bounded(timeline))
    return fields | reports.of_timeline(timeline)


def _bounded(timeline: Timeline) -> list[tuple[str, int, list[Bound]]]:
    """For makespan and span: its name, the plan's value in µs, and the lower bounds, the highest first."""
    require_search()
    from rota.search import bounds_of

    plan, bounded = timeline.plan, []
    with progress_line() as show:
        for objective, value_us in (("makespan", timeline.makespan_us), ("span", timeline.span_us)):
            show(f"computing lower bounds on the {objective} …")
            bounded.append((objective, value_us, bounds_of(plan.placement, plan.num_microbatches, objective)))
    return bounded


def _print_bounds(bounded: list[tuple[str, int, list[Bound]]]) -> None:
    from rota.search import gap

    for objective, value_us, bounds in bounded:
        best = bounds[0].us
        proof = "proven optimal" if value_us <= best else f"within {gap(value_us, best):.2%} of the optimum"
        print(fitted(f"{objective} {value_us:,} µs, lower bound {best:,} µs: {proof}", report_columns()))
        highest = {bound.name: bound for bound in reversed(bounds) if bound.us}
        for bound in sorted(highest.values(), key=lambda bound: -bound.us):
            print(fitted(f"  {bound.us:>12,} µs  {bound.name}: {bound.why}", report_columns(), 19))


def _on_devices(planned: Plan) -> DeviceOrder:
    """What is proved of devices with streams. Raises PlanError if the step could hang there."""
    with progress_line("proving that the step cannot hang on devices …"):
        return device_order.check_device_order(planned)


def _most_ctas(options: Options, planned: Plan) -> MostCtas | None:
    """How many CTAs kernels may have, if the devices are known. Raises PlanError if these have no room for the plan."""
    slots = num_slots(planned.placement)
    return None if options.sms is None else most_ctas(planned.placement, slots, options.sms)


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
    with files.named(path), progress_line("proving that the step cannot hang on PyTorch's engine …"):
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


def _print_torch(proof: _OnTorch) -> None:
    messages = "the messages that it derives" if proof.derives else "the CSV's messages"
    proved = proof.proved
    _print_proof(
        f"on PyTorch's engine, with {messages}: {proved.num_kernels:,} kernels on "
        f"{count_text(proved.num_ranks, 'rank')} with {count_text(proved.num_channels, 'channel')} have no cycle of "
        f"waits",
        "This holds whether PyTorch makes one NCCL communicator per pair of ranks or one for all ranks, even if each "
        "send waits for its receive and each device runs kernels in the order of their launch.",
    )
    if proof.differences:
        print_text(
            f"  PyTorch sends messages in a different order from the plan; makespan and --device refer to the plan's\n"
            f"  ({proof.differences}); rota.interop.keep_order runs the plan's order"
        )
    if proof.deferred:
        print_text(f"  defer_pp_recv=True could hang or swap messages; leave it off: {proof.deferred}")


def _print_devices(proved: DeviceOrder, most: MostCtas | None) -> None:
    meetings = f"{count_text(proved.num_channels, 'channel')} (one stream and communicator per directed pair of ranks)"
    if proved.num_collectives:
        meetings += f" and {count_text(proved.num_collectives, 'operation')} of several ranks"
    _print_proof(
        f"on devices with streams: {proved.num_kernels:,} kernels on {count_text(proved.num_ranks, 'rank')} with "
        f"{meetings} have no cycle of waits, and both sides of each communicator enqueue in the same order",
        "This holds even if each send waits for its receive and each device runs kernels only in the order of their "
        "launch. It is enough, because a kernel waits only for its stream, for events, for the other side of its "
        "message, and for kernels launched before it. "
        "NCCL requires operations to be submitted in the same order across ranks: "
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html",
    )
    slots = f"up to {count_text(proved.num_slots, 'kernel')} can be on a device at once, one per stream"
    if most is None:
        print_text(f"  {slots}: say how many multiprocessors it has (--sms 132, --sms h100), and this is compared")
        return
    print_text(
        f"  {slots}: if each has at most {count_text(most.everywhere, 'CTA')}, as rota.Pipeline asks of NCCL, there is "
        f"room for all of them, so no order in which a device serves its streams can hang"
    )


def _print_proof(claim: str, why: str) -> None:
    print_text(claim)
    print(fitted(f"  {why}", report_columns() or _PARAGRAPH_COLUMNS, 2))
