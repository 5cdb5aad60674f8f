"""PyTorch's schedule CSV: one line per rank, one cell per action, in the order in which the rank runs them.

    0F0,0F1,,0B0,0F2                     compute only; blanks are idle time and have no meaning
    0F0,0SEND_F0,0F1,…,0RECV_B0,0B0      with communication: 1RECV_F0 is what 0SEND_F0 sends
    (3F1;0B2)OVERLAP_F_B                 a forward and a backward that PyTorch may run as one

It can express only chains of stages, each on one rank. When it is read, communication is verified and then dropped,
because a plan derives its own. PyTorch's own UNSHARD, RESHARD, REDUCE_GRAD and waits are dropped too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from rota.core.errors import FormatError, ScheduleError
from rota.core.placement import Placement
from rota.core.tasks import Kind, Op

_MESSAGE = re.compile(r"(\d{1,9})(SEND|RECV)_([FB])(\d{1,9})", re.ASCII)
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_DROPPED = re.compile(r"\d{1,9}(UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB])\d{0,9}", re.ASCII)

Orders = Sequence[Sequence[Op]]
#: An op, or (source, target, sender, receiver, bytes) of a transfer.
Wire = Iterable[Op | tuple[Op, Op, int, int, int]]


class Message(NamedTuple):
    """One side of a transfer, as `stage` sees it: the send of its output, or the receive of its input."""

    stage: int
    sends: bool
    forward: bool
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{'SEND' if self.sends else 'RECV'}_{'F' if self.forward else 'B'}{self.microbatch}"

    @property
    def other(self) -> Message:
        """The other side of the transfer."""
        further = 1 if self.forward == self.sends else -1
        return Message(self.stage + further, not self.sends, self.forward, self.microbatch)


# --- reading ----------------------------------------------------------------------------------------------------------


class _Cell(NamedTuple):
    action: Op | Message
    where: str


def read(text: str, placement: Placement | None = None) -> tuple[tuple[Op, ...], ...]:
    """Read a schedule CSV.

    Args:
        text: The CSV. Blank lines at the end are not ranks, unless the placement has these ranks.
        placement: The placement to read it for. If it splits a stage's backward, B is read as I and W.

    Returns:
        Each rank's ops.

    Raises:
        FormatError: A cell is not an action, or communication does not fit the ops; the message names line and cell.
        ScheduleError: The CSV has communication, but the placement is not a chain.
    """
    lines = read_actions(text, 0 if placement is None else placement.num_ranks)
    orders = tuple(tuple(action for action in line if isinstance(action, Op)) for line in lines)
    if placement is None:
        return orders
    if any(len(order) < len(line) for order, line in zip(orders, lines, strict=True)):
        require_chain(placement)
    return tuple(tuple(part for op in order for part in _as_placed(op, placement)) for order in orders)


def read_actions(text: str, num_ranks: int = 0) -> tuple[tuple[Op | Message, ...], ...]:
    """Each rank's ops and messages, at least `num_ranks` ranks. Raises FormatError as `read` does."""
    lines = [_read_line(line, number) for number, line in enumerate(text.splitlines(), 1)]
    while len(lines) > num_ranks and not lines[-1]:
        lines.pop()
    if any(isinstance(action, Message) for line in lines for action, _ in line):
        _verify(lines, stage_ranks([[action for action, _ in line if isinstance(action, Op)] for line in lines]))
    return tuple(tuple(action for action, _ in line) for line in lines)


def stage_ranks(orders: Orders) -> list[int]:
    """The first rank that runs each stage. Raises FormatError if no rank runs one of them."""
    ranks: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for op in order:
            ranks.setdefault(op.stage, rank)
    for stage in range(len(ranks)):
        if stage not in ranks:
            raise FormatError(f"the CSV never runs stage {stage}, but runs stage {max(ranks)}; stages count from 0")
    return [ranks[stage] for stage in range(len(ranks))]


def _read_line(line: str, number: int) -> list[_Cell]:
    cells = []
    for column, text in enumerate(line.split(","), 1):
        where = f"line {number}, cell {column}"
        try:
            cells += [_Cell(action, where) for action in _parse_cell(text.strip())]
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from None
    return cells


def _parse_cell(text: str) -> list[Op | Message]:
    if message := _MESSAGE.fullmatch(text):
        stage, verb, way, microbatch = message.groups()
        return [Message(int(stage), verb == "SEND", way == "F", int(microbatch))]
    if pair := _PAIR.fullmatch(text):
        return [Op.parse(op) for op in pair[1].split(";")]
    return [] if not text or _DROPPED.fullmatch(text) else [Op.parse(text)]


def _as_placed(op: Op, placement: Placement) -> tuple[Op, ...]:
    if op.kind is Kind.B and (op.stage, Kind.B) not in placement.index and (op.stage, Kind.W) in placement.index:
        return op._replace(kind=Kind.I), op._replace(kind=Kind.W)
    return (op,)


# --- verifying --------------------------------------------------------------------------------------------------------


def _verify(lines: Sequence[Sequence[_Cell]], ranks: Sequence[int]) -> None:
    """Raise FormatError unless each value between ranks is sent once, after it is made, and received before use."""
    messages = {cell.action for line in lines for cell in line if isinstance(cell.action, Message)}
    for rank, line in enumerate(lines):
        done: set[Op | Message] = set()
        for action, where in line:
            if action.stage >= len(ranks):
                problem = f"belongs to stage {action.stage}, which no line runs; remove it"
            elif ranks[action.stage] != rank:
                home = ranks[action.stage]
                problem = f"is on rank {rank}, but stage {action.stage} runs on rank {home}; move it to line {home + 1}"
            elif isinstance(action, Op):
                problem = _op_problem(action, ranks, done)
            else:
                problem = _message_problem(action, ranks, done, messages)
            if problem:
                raise FormatError(f"{where}: {action} {problem}")
            done.add(action)


def _op_problem(op: Op, ranks: Sequence[int], done: set[Op | Message]) -> str:
    if op.kind not in (Kind.F, Kind.B, Kind.I):
        return ""
    needed = Message(op.stage, False, op.kind is Kind.F, op.microbatch)
    crosses = 0 <= needed.other.stage < len(ranks) and ranks[needed.other.stage] != ranks[op.stage]
    return f"runs before its input has arrived; put {needed} before it" if crosses and needed not in done else ""


def _message_problem(message: Message, ranks: Sequence[int], done: set[Op | Message], messages: set[Message]) -> str:
    other = message.other
    kinds = (Kind.F,) if message.forward else (Kind.B, Kind.I)
    sources = [Op(message.stage, kind, message.microbatch) for kind in kinds]
    if message in done:
        return "appears twice; remove one of them"
    if not 0 <= other.stage < len(ranks):
        return f"has no stage {other.stage} at its other end; remove it"
    if ranks[other.stage] == ranks[message.stage]:
        return f"stays on rank {ranks[other.stage]}, where stage {other.stage} is too; remove it"
    if other not in messages:
        return f"has no {other}; put it into line {ranks[other.stage] + 1}"
    if message.sends and done.isdisjoint(sources):
        return f"sends what is not made yet; put it after {' or '.join(map(str, sources))}"
    return ""


# --- writing ----------------------------------------------------------------------------------------------------------


def write(orders: Orders, wire: Wire | None = None) -> str:
    """Write a schedule CSV.

    Args:
        orders: Each rank's ops.
        wire: All ops and transfers in one global order: PyTorch's "compute_comms" is written, with sends, receives, and
            REDUCE_GRAD for each stage, without which PyTorch would neither scale nor reduce its gradients. It has no
            UNSHARD, which `rota.interop.keep_order` adds for sharded stages (FSDP), and no waits, which it adds for
            PyTorch 2.15. None: only ops.
    """
    lines = [[*map(str, order)] for order in orders] if wire is None else _with_communication(orders, wire)
    return "".join(",".join(line) + "\n" for line in lines)


def _with_communication(orders: Orders, wire: Wire) -> list[list[str]]:
    """Each rank's cells; reductions come after the messages of the last gradient, which other ranks wait for."""
    ranks, lines = stage_ranks(orders), [list[str]() for _ in orders]
    last_gradients = {op.stage: op for order in orders for op in order if op.kind.makes_weight_gradients}
    due: dict[int, str] = {}  # by rank, the reduction that follows
    for action in wire:
        if isinstance(action, Op):
            rank = ranks[action.stage]
            lines[rank] += [due.pop(rank)] if rank in due else []
            lines[rank].append(str(action))
            if last_gradients.get(action.stage) == action:
                due[rank] = f"{action.stage}REDUCE_GRAD"
        else:
            source, _, sender, receiver, _ = action
            message = Message(source.stage, True, source.kind is Kind.F, source.microbatch)
            lines[sender].append(str(message))
            lines[receiver].append(str(message.other))
    for rank, cell in due.items():
        lines[rank].append(cell)
    return lines


# --- what it cannot express -------------------------------------------------------------------------------------------


def require_chain(placement: Placement, otherwise: str = "or keep the plan by to_json") -> None:
    """Check that a schedule CSV can express plans of a placement.

    Args:
        placement: The placement.
        otherwise: A remedy for the error message, besides another plan.

    Raises:
        ScheduleError: The stages are not a chain 0, 1, …, each on one rank, without recompute and offload.
    """
    if wrong := next(_differences_from_chain(placement), None):
        raise ScheduleError(f"PyTorch's schedule CSV {wrong}, {otherwise}")


def _differences_from_chain(placement: Placement) -> Iterator[str]:
    """What the CSV cannot express, and what to do."""
    flows: list[list[Kind]] = []
    for stage in range(placement.num_stages):
        tasks = [task for task in placement.tasks if task.stage == stage]
        ranks = sorted({rank for task in tasks for rank in task.ranks})
        flows.append(sorted((task.kind for task in tasks), key="FBIWROL".find))
        if Kind.R in flows[-1]:
            yield f"cannot express {stage}R: plan without recompute (`rota autoplan --exportable`)"
        if Kind.O in flows[-1]:
            yield f"cannot express {stage}O: plan without offload_bytes"
        if len(ranks) > 1:
            on = ", ".join(map(str, ranks))
            yield f"has one rank per stage, but stage {stage} is on ranks {on}: place it on one"
        if (has := " ".join(flows[-1])) not in ("F", "F B", "F I W"):
            yield (
                f"has stages 0, 1, … of F, of F and B, or of F, I and W, but stage {stage} has {has or 'no task'}: "
                "number and split them like that"
            )
    names = [str(task) for task in placement.tasks]
    edges = Counter((names[edge.source], names[edge.target]) for edge in placement.edges)
    chain = Counter(_chain_edges(flows))
    for odd_edges, problem in ((edges - chain, "this one also has"), (chain - edges, "this one lacks")):
        for source, target in odd_edges:
            yield f"is for a chain, but {problem} {source} -> {target}: place one (`rota autoplan --exportable`)"


def _chain_edges(flows: Sequence[Sequence[Kind]]) -> Iterator[tuple[str, str]]:
    """The edges of a chain, as names of tasks."""
    backs = [f"{stage}{(*flow, Kind.B)[1]}" for stage, flow in enumerate(flows)]
    for stage, flow in enumerate(flows):
        yield from pairwise(f"{stage}{kind}" for kind in flow)
        if stage > 0:
            yield f"{stage - 1}F", f"{stage}F"
        if stage > 0 and any(len(kinds) > 1 for kinds in flows):
            yield backs[stage], backs[stage - 1]
