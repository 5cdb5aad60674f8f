"""A chain of stages in plain integers, for the automatic zero-bubble scheduler: build orders, and time them.

A rank's order is a `bytearray` of FORWARD, INPUT and WEIGHT. Each kind is done in micro-batch order, so the letters
alone say which op is meant. A rank's first op is a forward that starts as soon as it can, so the opening of its busy
window is fixed, and a short span means an early end.

    rank 0  F0 F1 F2 F3 .  .  I0 W0 …          round trip of rank 0: end of its F0 to start of its I0
    rank 1  .  F0 F1 .  I0 F2 W0 I1 …
    rank 2  .  .  F0 I0 F1 I1 W0 F2 …
               └─ opens
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from rota.stopping import look

FORWARD, INPUT, WEIGHT = range(3)
NEVER = 1 << 100  # later than any arrival; as bytes, more than any plan holds

Orders = list[bytearray]


@dataclass(frozen=True)
class Pipe:
    """Time and memory of the ranks, one entry per rank; inner tuples are over FORWARD, INPUT and WEIGHT.

    Attributes:
        num_microbatches: Micro-batches per step.
        times_us: Durations.
        down_us: Duration of the transfer of an activation to the rank.
        up_us: Duration of the transfer of a gradient to the rank.
        headroom_bytes: The limit less static bytes.
        needs_bytes: Bytes that must be free for an op to start.
        keeps_bytes: Bytes that an op keeps after it; negative: frees.
    """

    num_microbatches: int
    times_us: tuple[tuple[int, int, int], ...]
    down_us: tuple[int, ...]
    up_us: tuple[int, ...]
    headroom_bytes: tuple[int, ...]
    needs_bytes: tuple[tuple[int, int, int], ...]
    keeps_bytes: tuple[tuple[int, int, int], ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.times_us)

    @cached_property
    def opens_us(self) -> tuple[int, ...]:
        """When each rank's busy window opens, whatever the orders."""
        opens = [0]
        for times, down in zip(self.times_us, self.down_us[1:], strict=False):
            opens.append(opens[-1] + times[FORWARD] + down)
        return tuple(opens)

    @cached_property
    def round_trips_us(self) -> tuple[int, ...]:
        """The least time from the end of each rank's forward to the start of its input gradient."""
        trips = [0]
        for r in range(self.num_ranks - 1, 0, -1):
            forward, back, _ = self.times_us[r]
            trips.append(max(0, self.down_us[r] + forward + trips[-1] + back + self.up_us[r - 1]))
        return tuple(reversed(trips))

    @cached_property
    def admits_bytes(self) -> tuple[int, ...]:
        """Bytes that must be free for a forward, so that all ops that follow from it can always run after it."""
        admits = []
        for needs, keeps in zip(self.needs_bytes, self.keeps_bytes, strict=True):
            after = max(needs[INPUT], needs[WEIGHT], keeps[INPUT] + needs[WEIGHT])
            admits.append(max(needs[FORWARD], keeps[FORWARD] + after))
        return tuple(admits)

    def least_span_us(self) -> int:
        """A lower bound for the span of all orders.

        Head: before a rank's first input gradient is back, it can only do the forwards that fit. Tail: between its last
        forward and that micro-batch's input gradient, it can only do what memory then holds. Path: to rank k, all its
        forwards and input gradients, and back.
        """
        m = self.num_microbatches
        least, heads = 0, []
        for r, trip in enumerate(self.round_trips_us):
            forward, back, weight = self.times_us[r]
            headroom, held = self.headroom_bytes[r], self.keeps_bytes[r][FORWARD]
            fit = max(1, min(m, 1 + (headroom - self.admits_bytes[r]) // held if held > 0 else m))
            heads.append(max(0, trip - (fit - 1) * forward))
            by_weight = -self.keeps_bytes[r][WEIGHT]
            left = (m - 1) * (back + weight)
            if held > 0 and by_weight > 0:
                free = headroom - held
                left = min(left, max((back + weight) * free // held, weight * free // by_weight))
            tail = max(0, trip - left)
            least = max(least, m * sum(self.times_us[r]) + (heads[r] + tail if fit < m else max(heads[r], tail)))
        for r in range(self.num_ranks):
            homeward = self.times_us[r][WEIGHT]
            for k in range(r, self.num_ranks):
                forward, back, _ = self.times_us[k]
                there = self.opens_us[k] - self.opens_us[r]
                least = max(least, there + heads[k] + m * (forward + back) + homeward)
                homeward += self.up_us[k] + back
        return least

    def fitted(self, r: int, order: bytearray) -> bytearray | None:
        """The order of rank `r`, with weight gradients earlier where memory requires it, without boundary buffers.

        None if that is not enough, or if an op comes before what it needs on its rank.
        """
        headroom, needs, keeps = self.headroom_bytes[r], self.needs_bytes[r], self.keeps_bytes[r]
        result, done, held, done_sooner = bytearray(), [0, 0, 0], 0, 0
        for due in order:
            if due == WEIGHT and done_sooner:
                done_sooner -= 1
                continue
            kind = -1
            while kind != due:
                sooner = due != WEIGHT and held + needs[due] > headroom and done[WEIGHT] < done[INPUT]
                kind = WEIGHT if sooner else due
                if held + needs[kind] > headroom or (kind and done[kind] == done[kind - 1]):
                    return None
                result.append(kind)
                done[kind] += 1
                held += keeps[kind]
                done_sooner += sooner
        return result


@dataclass(frozen=True, slots=True)
class Timing:
    """When each rank's ops start, in its order, and when its last one ends."""

    pipe: Pipe
    starts_us: list[list[int]]
    ends_us: list[int]

    @property
    def windows_us(self) -> list[int]:
        """Length of each rank's busy window."""
        return [end - opens for end, opens in zip(self.ends_us, self.pipe.opens_us, strict=True)]

    @property
    def score(self) -> tuple[int, int]:
        """(span, makespan): lower is better."""
        return max(self.windows_us), max(self.ends_us)


def time_orders(pipe: Pipe, orders: Orders) -> Timing | None:
    """Starts every op as early as possible; None if the orders wait in a cycle. They have passed `fitted`."""
    m, last = pipe.num_microbatches, pipe.num_ranks - 1
    activations = [[0] * m, *([NEVER] * m for _ in range(last))]  # when they are there
    gradients = [[NEVER] * m for _ in orders]
    starts: list[list[int]] = [[] for _ in orders]
    clocks, forwards, inputs = [0] * (last + 1), [0] * (last + 1), [0] * (last + 1)
    pending = list(range(last, -1, -1))
    while pending:  # each rank goes as far as it can, then the ranks that it fed do
        look()
        r = pending.pop()
        now, f, i = clocks[r], forwards[r], inputs[r]
        started, activation, gradient = starts[r], activations[r], gradients[r]
        forward_us, input_us, weight_us = pipe.times_us[r]
        below, down = (activations[r + 1], pipe.down_us[r + 1]) if r < last else (gradient, 0)
        above, up = (gradients[r - 1], pipe.up_us[r - 1]) if r else ([0] * m, 0)
        for kind in orders[r][len(started) :]:
            if kind == WEIGHT:
                started.append(now)
                now += weight_us
                continue
            arrival = activation[f] if kind == FORWARD else gradient[i]
            if arrival > now:
                if arrival == NEVER:
                    break
                now = arrival
            started.append(now)
            if kind == FORWARD:
                now += forward_us
                below[f] = now + down
                f += 1
            else:
                now += input_us
                above[i] = now + up
                i += 1
        if i > inputs[r] and r:
            pending.append(r - 1)
        if f > forwards[r] and r < last:
            pending.append(r + 1)
        clocks[r], forwards[r], inputs[r] = now, f, i
    return Timing(pipe, starts, clocks) if all(len(started) == 3 * m for started in starts) else None


@dataclass(frozen=True, slots=True)
class Policy:
    """How `build` decides.

    Attributes:
        caps: Most micro-batches in flight, per rank.
        span_us: When the last micro-batch should end.
        spacing_us: Time between consecutive micro-batches at the end, with which that is reached.
        urgent_first: Whether the op that is more urgent for that goes first; otherwise forwards do.
    """

    caps: tuple[int, ...]
    span_us: int
    spacing_us: int
    urgent_first: bool


def build(pipe: Pipe, policy: Policy) -> Orders | None:
    """Orders that fit, without boundary buffers; None if memory leaves a rank no op that it could run."""
    builder = _Builder(pipe, policy)
    while builder.heap:
        look()
        now, r = heappop(builder.heap)
        if now == builder.due[r]:
            builder.decide(now, r)
    return builder.orders if all(len(order) == 3 * pipe.num_microbatches for order in builder.orders) else None


class _Builder:
    """Ranks decide in the order of time.

    Ops that others wait for go first. In a gap, the rank runs a weight gradient. If none fits into the gap, it runs one
    that delays the next op, if that op can still be in time for the target span, or if the rank may not idle longer.
    """

    def __init__(self, pipe: Pipe, policy: Policy) -> None:
        self.pipe, self.policy = pipe, policy
        ranks = range(pipe.num_ranks)
        self.orders: Orders = [bytearray() for _ in ranks]
        never = [NEVER] * (pipe.num_microbatches + 1)
        self.activations = [[0] * pipe.num_microbatches + [NEVER], *(never[:] for _ in ranks[1:])]  # arrivals
        self.gradients = [never[:] for _ in ranks]
        self.done = [[0, 0, 0] for _ in ranks]
        self.held = [0] * len(ranks)
        self.free_at = [0] * len(ranks)
        self.may_idle = [policy.span_us - pipe.num_microbatches * sum(times) for times in pipe.times_us]
        self.latest = self._latest_starts()
        self.due = [0] + [NEVER] * (len(ranks) - 1)  # when a rank decides next; a heap entry of another time is void
        self.heap = [(0, 0)]

    def _latest_starts(self) -> list[tuple[int, int]]:
        """Per rank, when the forward and the input gradient of micro-batch 0 must start."""
        pipe, later = self.pipe, (self.pipe.num_microbatches - 1) * self.policy.spacing_us
        by = self.policy.span_us - pipe.times_us[0][WEIGHT] - later
        inputs = []
        for times, up in zip(pipe.times_us, (0, *pipe.up_us), strict=False):
            by -= up + times[INPUT]
            inputs.append(by)
        forwards = []
        for times, down in zip(reversed(pipe.times_us), (0, *reversed(pipe.down_us)), strict=False):
            by -= down + times[FORWARD]
            forwards.append(by)
        return list(zip(reversed(forwards), inputs, strict=True))

    def decide(self, now: int, r: int) -> None:
        """Starts an op on rank `r`, or says when the rank decides next."""
        pipe, policy = self.pipe, self.policy
        f, i, w = self.done[r]
        activation = self.activations[r][f] if f - i < policy.caps[r] else NEVER
        gradient = self.gradients[r][i]
        latest_forward = self.latest[r][FORWARD] + f * policy.spacing_us
        latest_input = self.latest[r][INPUT] + i * policy.spacing_us
        headroom, (_, input_needs, weight_needs) = pipe.headroom_bytes[r] - self.held[r], pipe.needs_bytes[r]
        fits = headroom >= pipe.admits_bytes[r]
        kind = -1
        if activation <= now and fits:
            yields = policy.urgent_first and gradient <= now and latest_input < latest_forward
            kind = INPUT if yields else FORWARD
        elif gradient <= now:
            kind = INPUT
        elif activation <= now and w < i:
            kind = WEIGHT
        if kind == INPUT and headroom < max(input_needs, pipe.keeps_bytes[r][INPUT] + weight_needs):
            kind = WEIGHT if w < i else -1
        if kind < 0:
            wake, latest = gradient, latest_input
            if now < activation < wake and (fits or w < i):
                wake, latest = activation, latest_forward
            end = now + pipe.times_us[r][WEIGHT]
            if w < i and (end <= wake or end <= latest or wake - self.free_at[r] > self.may_idle[r]):
                kind = WEIGHT
            else:
                self.due[r] = wake
                if now < wake < NEVER:
                    heappush(self.heap, (wake, r))
                return
        self._start(now, r, kind)

    def _start(self, now: int, r: int, kind: int) -> None:
        pipe, m, order = self.pipe, self.pipe.num_microbatches, self.orders[r]
        if order:
            self.may_idle[r] -= now - self.free_at[r]
        microbatch = self.done[r][kind]
        end = self.free_at[r] = now + pipe.times_us[r][kind]
        order.append(kind)
        self.done[r][kind] += 1
        self.held[r] += pipe.keeps_bytes[r][kind]
        self._decide_at(end, r)
        if kind == FORWARD and r + 1 < pipe.num_ranks:
            self.activations[r + 1][microbatch] = end + pipe.down_us[r + 1]
            fed = r + 1
        elif kind == FORWARD:
            self.gradients[r][microbatch] = end
            return
        elif kind == INPUT and r:
            self.gradients[r - 1][microbatch] = end + pipe.up_us[r - 1]
            fed = r - 1
        else:
            return
        if self.free_at[fed] <= now and len(self.orders[fed]) < 3 * m:  # it idles, and may decide otherwise now
            self._decide_at(now, fed)

    def _decide_at(self, time: int, r: int) -> None:
        self.due[r] = time
        heappush(self.heap, (time, r))
