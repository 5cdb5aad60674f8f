"""The proof that PyTorch's pipeline engine cannot hang with a schedule CSV with communication.

PyTorch's engine runs a rank's cells in their order, and enqueues one kernel per message. Which kernels share a stream
depends on how the process group was made:

    init_process_group("nccl")                  a communicator and a stream per pair of ranks, for both directions
    init_process_group("nccl", device_id=…)     one of each per rank, for all messages

A message's kernel waits for the ops enqueued before it, also where it receives. What is proved for one stream, on a
device that runs kernels in the order of their launch, holds for all of these.
"""

from __future__ import annotations

from collections.abc import Sequence

from rota.core import schedule_csv
from rota.core.errors import FormatError, PlanError
from rota.core.programs.device_order import DeviceOrder, prove
from rota.core.programs.device_steps import COMPUTE, DeviceProgram, Step, What, channel
from rota.core.schedule_csv import Message
from rota.core.tasks import Kind, Op, Transfer
from rota.core.text import count_text

#: In which setting a cycle is looked for: stream per pair or not, in the order of launch or not; from where most runs
#: are to the strictest, which has the waits of the others.
_SETTINGS = (
    ("where each pair of ranks has a communicator (init_process_group without device_id)", True, False),
    ("where all messages share the group's communicator (init_process_group with device_id)", False, False),
    ("where a device runs kernels in the order of their launch", False, True),
)


def check_torch_order(text: str) -> DeviceOrder:
    """Prove that PyTorch's engine cannot hang on GPUs with a schedule CSV with communication.

    This holds for both ways in which PyTorch makes communicators, even if each send waits for its receive, and if a
    device runs kernels only in the order of their launch.

    Args:
        text: The CSV, such as `Plan.to_csv(communication=True)`, or as PyTorch derives it.

    Returns:
        What was proved.

    Raises:
        FormatError: A cell is not an action, or communication is missing or does not fit the ops.
        PlanError: Kernels could wait in a cycle, or the two ends of a channel have different orders (reason "device
            order"); the message says in which setting.
    """
    if not has_communication(text):
        raise FormatError("the CSV has no communication; write it by `plan.to_csv(communication=True)`")
    try:
        return prove(torch_programs(text, by_pair=False))
    except PlanError:
        for setting, by_pair, serial in _SETTINGS:
            try:
                prove(torch_programs(text, by_pair=by_pair), serial=serial)
            except PlanError as error:
                raise PlanError(f"{setting}: {error}", error.reason) from None
        raise


def has_communication(text: str) -> bool:
    """Whether a schedule CSV has all messages between its ranks. Raises FormatError if it is malformed."""
    lines = schedule_csv.read_actions(text)
    return len(set(_ranks(lines))) < 2 or any(isinstance(action, Message) for line in lines for action in line)


def first_differences(text: str, other: str) -> str:
    """Where two CSVs with communication have messages in different orders, in words; "" if nowhere."""
    differences = []
    for rank, lines in enumerate(zip(*map(schedule_csv.read_actions, (text, other)), strict=True)):
        a, b = ([action for action in line if isinstance(action, Message)] for line in lines)
        if first := next(((x, y) for x, y in zip(a, b, strict=True) if x != y), None):
            differences.append(f"rank {rank}: {first[0]} for {first[1]}")
    more = f", and on {count_text(len(differences) - 2, 'rank')} more" * (len(differences) > 2)
    return ", ".join(differences[:2]) + more


def torch_programs(text: str, *, by_pair: bool) -> list[DeviceProgram]:
    """What each rank enqueues for a CSV with communication; by_pair: the messages of each pair of ranks on a stream."""
    lines = schedule_csv.read_actions(text)
    ranks = _ranks(lines)
    return [DeviceProgram(rank, _steps(line, ranks, by_pair)) for rank, line in enumerate(lines)]


def _ranks(lines: Sequence[Sequence[Op | Message]]) -> list[int]:
    return schedule_csv.stage_ranks([[action for action in line if isinstance(action, Op)] for line in lines])


def _steps(line: Sequence[Op | Message], ranks: Sequence[int], by_pair: bool) -> tuple[Step, ...]:
    steps: list[Step] = []
    last: tuple[int, ...] = ()  # the op enqueued last
    received: dict[tuple[int, bool, int], int] = {}  # by stage, whether forward, and micro-batch
    for action in line:
        if isinstance(action, Op):
            key = action.stage, action.kind is Kind.F, action.microbatch
            waits = (received[key],) if action.kind in (Kind.F, Kind.B, Kind.I) and key in received else ()
            steps.append(Step("run", COMPUTE, action, waits))
            last = (len(steps) - 1,)
            continue
        transfer = _transfer(action, ranks)
        pair = sorted((transfer.sender, transfer.receiver))
        stream = f"messages of ranks {pair[0]} and {pair[1]}" if by_pair else "messages"
        what: What = "send" if action.sends else "receive"
        if not action.sends:
            received[action.stage, action.forward, action.microbatch] = len(steps)
        steps.append(Step(what, stream, transfer, last, communicator=channel(transfer)))
    return tuple(steps)


def _transfer(message: Message, ranks: Sequence[int]) -> Transfer:
    """The transfer of which this is a side; the same for both sides."""
    send = message if message.sends else message.other
    kind = Kind.F if send.forward else Kind.B
    target = send.other.stage
    return Transfer(
        Op(send.stage, kind, send.microbatch), Op(target, kind, send.microbatch), ranks[send.stage], ranks[target], 0
    )
