"""Lists of steps for a device, and ways to enqueue them wrongly."""

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import PlanError, ScheduleError
from rota.core.placing import bidirectional
from rota.core.plan import Plan
from rota.core.programs.actions import NUM_OPS_AHEAD
from rota.core.programs.device_order import prove
from rota.core.programs.device_steps import Communicator, DeviceProgram, Step
from rota.schedules import FAMILIES, Family
from support.sampling import IS_WHOLE

Programs = Sequence[DeviceProgram]

NUMBERS_OF_RANKS = range(2, 9) if IS_WHOLE else (2, 4, 5)


def family_plans(
    families: Sequence[Family] = FAMILIES,
    ranks: Sequence[int] = NUMBERS_OF_RANKS,
    latencies_us: Sequence[int] = (0, 15, 100),
) -> Iterator[Plan]:
    """Each family on 2 to 8 ranks, without latency, with some, and with more than an op lasts."""
    for family, num_ranks, latency_us in product(families, ranks, latencies_us):
        num_stages = num_ranks * (1 if family.place is bidirectional else family.stages_per_rank)
        costs = family.adapted(Costs.uniform(num_stages, 10, 10, 7, activation_bytes=2, boundary_bytes=1))
        for num_microbatches in (num_ranks, 2 * num_ranks):
            try:
                placement = family.place(costs, Cluster.uniform(num_ranks, latency_us=latency_us))
                if family.name == "seq1f1b":
                    placement = placement.in_chunks(num_ranks, num_microbatches)
                yield family(placement, num_microbatches)
            except (ScheduleError, ValueError):
                continue


def is_proved(programs: Programs, serial: bool) -> bool:
    """Whether the proof accepts what all ranks enqueue."""
    try:
        prove(programs, serial=serial)
    except PlanError:
        return False
    return True


def in_order(program: DeviceProgram, order: Sequence[int]) -> DeviceProgram:
    """The same steps, enqueued in another order: `order` has their old positions."""
    new = {old: i for i, old in enumerate(order)}
    steps = [program.steps[old] for old in order]
    return replace(program, steps=tuple(replace(s, waits=tuple(new[w] for w in s.waits)) for s in steps))


def with_early_receives(program: DeviceProgram) -> DeviceProgram:
    """Each receive is enqueued some ops before its reader, as receives are posted on a host."""
    ops = [i for i, step in enumerate(program.steps) if step.what == "run"]
    number = {program.steps[i].subject: n for n, i in enumerate(ops)}
    order: list[int] = []
    floor: dict[str, int] = {}  # by channel: the op before which its last receive is enqueued, to keep their order
    for i, step in enumerate(program.steps):
        if step.what == "receive" and step.message is not None:
            early = max(number[step.message.transfer.target] - NUM_OPS_AHEAD, floor.get(step.stream, 0))
            before = min(early, bisect_left(ops, i))
            floor[step.stream] = before
            at = order.index(ops[before]) if ops[before] < i else len(order)
            order[at:at] = [step.waits[0], i]
        elif step.what != "allocate":
            order.append(i)
    return in_order(program, order)


def with_pair_communicators(program: DeviceProgram) -> DeviceProgram:
    """One stream and communicator for both directions."""

    def paired(step: Step) -> Step:
        if step.communicator is None or step.communicator.use != "channel":
            return step
        a, b = sorted(step.communicator.ranks)
        return replace(step, stream=f"pair {a} {b}", communicator=Communicator("channel", (a, b)))

    return replace(program, steps=tuple(map(paired, program.steps)))


def shuffled(program: DeviceProgram, rng: random.Random, num_moves: int) -> DeviceProgram:
    """Some steps moved, each behind all that it waits for and before all that waits for it, ops in their order."""
    order = [*range(len(program.steps))]
    for _ in range(num_moves):
        order = _with_one_moved(program, order, rng)
    return in_order(program, order)


def _with_one_moved(program: DeviceProgram, order: list[int], rng: random.Random) -> list[int]:
    at = rng.randrange(len(order))
    moved = order[at]
    step = program.steps[moved]

    def is_fixed(other: int) -> bool:
        is_compute = step.stream == program.steps[other].stream == "compute"
        return is_compute or other in step.waits or moved in program.steps[other].waits

    low = next((i + 1 for i in reversed(range(at)) if is_fixed(order[i])), 0)
    high = next((i - 1 for i in range(at + 1, len(order)) if is_fixed(order[i])), len(order) - 1)
    rest = order[:at] + order[at + 1 :]
    to = rng.randint(low, high)
    return [*rest[:to], moved, *rest[to:]]


def replicated(programs: Programs, num_replicas: int) -> list[DeviceProgram]:
    """The ranks of several pipelines, whose reductions meet: rank r of replica k is r + k times the number of ranks."""
    n = len(programs)

    def moved(step: Step, rank: int, replica: int) -> Step:
        if step.what == "reduce":
            everyone = tuple(rank + k * n for k in range(num_replicas))
            return replace(step, communicator=Communicator("stage", everyone))
        if step.communicator is None:
            return step
        ranks = tuple(other + replica * n for other in step.communicator.ranks)
        return replace(step, communicator=step.communicator._replace(ranks=ranks))

    return [
        DeviceProgram(p.rank + k * n, tuple(moved(step, p.rank, k) for step in p.steps))
        for k in range(num_replicas)
        for p in programs
    ]


def swapped_on_a_channel(programs: Programs, rng: random.Random) -> Programs | None:
    """Two neighbouring receives of one channel change places. None: there are none."""
    found = []
    for program in programs:
        receives: dict[str, list[int]] = {}
        for i, step in enumerate(program.steps):
            if step.what == "receive":
                receives.setdefault(step.stream, []).append(i)
        found += [(program.rank, a, b) for of in receives.values() for a, b in pairwise(of)]
    if not found:
        return None
    rank, a, b = rng.choice(found)
    order = [*range(len(programs[rank].steps))]
    # The later one, with its buffer, comes right before the earlier one.
    moved = [i for i in (*programs[rank].steps[b].waits, b) if i > a]
    order = [i for i in order if i not in moved]
    at = order.index(a)
    order[at:at] = moved
    return [in_order(p, order) if p.rank == rank else p for p in programs]


def overtaken_on_a_channel(programs: Programs, rng: random.Random) -> Programs | None:
    """On both sides of one channel a message goes before some that it came after. None: no channel has two."""
    sends = [
        (p.rank, [i for i, s in enumerate(p.steps) if s.what == "send" and s.stream == stream])
        for p in programs
        for stream in dict.fromkeys(step.stream for step in p.steps)
    ]
    sends = [(rank, of) for rank, of in sends if len(of) > 1]
    if not sends:
        return None
    sender, of = rng.choice(sends)
    k, j = sorted(rng.sample(range(len(of)), 2))
    steps = programs[sender].steps
    stream = steps[of[0]].stream
    late = {*of[k:j]}
    late |= {i for i, s in enumerate(steps) if s.what == "release" and i < of[j] and late.intersection(s.waits)}
    order = [i for i in range(len(steps)) if i not in late]
    at = order.index(of[j]) + 1
    changed = {sender: in_order(programs[sender], [*order[:at], *sorted(late), *order[at:]])}
    communicator = steps[of[0]].communicator
    receiver = communicator.ranks[1]
    steps = programs[receiver].steps
    received = [i for i, s in enumerate(steps) if s.what == "receive" and s.stream == stream]
    early = [i for i in (*steps[received[j]].waits, received[j]) if i > received[k]]
    order = [i for i in range(len(steps)) if i not in early]
    at = order.index(received[k])
    changed[receiver] = in_order(programs[receiver], [*order[:at], *early, *order[at:]])
    return [changed.get(p.rank, p) for p in programs]
