"""Backup plans: how the ranks that are left do the whole step after one is lost, on all replicas of a pipeline.

Gandhi et al., "ReCycle: Resilient Training of Large DNNs using Pipeline Adaptation", SOSP 2024: the peers of a lost
rank, which have the same weights in the other replicas, take its micro-batches (section 3.1); backwards that are split
into I and W fill the bubbles in which they fit (section 3.2).

    replica 0   rank 0 ─▶   lost   ─▶ rank 2        one plan for 5 ranks, with a data stream for each replica;
    replica 1   rank 0 ─▶ rank 1 ×2 ─▶ rank 2       rank 1 of replica 1 has its stages in both streams
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple, final

from rota import reading
from rota.checking import check
from rota.cluster import Cluster, Link, SharedLink
from rota.errors import FormatError, PlacementError, PlanError
from rota.placement import Edge, Placement, StepEnd
from rota.plan import Plan
from rota.replanning import fastest_that_fits
from rota.simulation import simulate
from rota.tables import fitted, table_lines
from rota.tasks import Kind, Task
from rota.units import angle_repr, count_text, size_text, time_text

_MOST_REPLICAS = 1024  # in a file


class Place(NamedTuple):
    """A rank of a plan, in one of its replicas."""

    replica: int
    rank: int


@dataclass(frozen=True, slots=True)
class Backup:
    """What the other ranks do without one rank of one replica, whichever it is.

    Attributes:
        lost: The lost rank.
        plan: The plan for the ranks that are left: those of the replica that lost it come first, then the others'.
        makespan_us: How long its step takes.
        bound_us: No plan for these ranks takes less time.
    """

    lost: int
    plan: Plan
    makespan_us: int
    bound_us: int


@final
@dataclass(frozen=True, slots=True)
class Backups:
    """A backup plan for each single rank of a plan.

    Attributes:
        plan: The plan of each replica while no rank is lost.
        num_replicas: Number of replicas.
        backups: One per rank, in their order.
    """

    plan: Plan
    num_replicas: int
    backups: tuple[Backup, ...]

    def __str__(self) -> str:
        """One line."""
        sizes = f"{count_text(self.num_replicas, 'replica')} of {count_text(self.plan.num_ranks, 'rank')}"
        return f"Backups for {sizes}: {count_text(len(self.backups), 'plan')}"

    __repr__ = angle_repr

    def to_text(self, width: int | None = None) -> str:
        """A table of what the loss of each rank costs, with a heading, in lines of at most `width`."""
        normal = simulate(self.plan)
        micro = count_text(self.plan.num_microbatches, "micro-batch", "es")
        lines = [
            f"{count_text(self.num_replicas, 'replica')} of {count_text(self.plan.num_ranks, 'rank')}, {micro} each: "
            f"a step takes {time_text(normal.makespan_us)}, and without one rank of one replica:"
        ]
        rows = []
        for backup in self.backups:
            more = backup.makespan_us / normal.makespan_us - 1
            peak = max(simulate(backup.plan).peak_memory_bytes)
            bound = f"{time_text(backup.bound_us)} ({1 - backup.bound_us / backup.makespan_us:.1%})"
            is_split = any(task.kind is Kind.W for task in backup.plan.placement.tasks)
            rows.append(
                (
                    str(backup.lost),
                    time_text(backup.makespan_us),
                    f"{more:+.1%}",
                    bound,
                    size_text(peak),
                    "split" if is_split else "whole",
                )
            )
        header = ("lost rank", "step", "more", "bound (gap)", "most memory", "backward")
        table = table_lines(header, rows, width=width, optional=("backward", "most memory", "bound (gap)"))
        return "\n".join([*(fitted(line, width, 2) for line in lines), *table])

    def to_json(self) -> str:
        """The text of a "backups" file, one line per lost rank, which `from_json` reads."""
        backups = [{"lost": one.lost, "bound_us": one.bound_us, "plan": one.plan.to_fields()} for one in self.backups]
        fields = {"num_replicas": self.num_replicas, "of_plan": digest_of(self.plan), "backups": backups}
        return reading.dump("backups", fields)

    @classmethod
    def from_json(cls, text: str, plan: Plan) -> Backups:
        """Read what `to_json` wrote for `plan`.

        Raises:
            FormatError: The text is damaged, or was made for another plan.
            PlacementError, PlanError: A plan in it is not one for the ranks that are left, or `check` refuses it.
        """
        document = reading.parse(text, "backups")
        document.refuse_others(("rota", "num_replicas", "of_plan", "backups"))
        num_replicas = document["num_replicas"].integer(2, _MOST_REPLICAS)
        if document["of_plan"].text() != digest_of(plan):
            raise document["of_plan"].wrong(f"{digest_of(plan)!r}, as the backups of this plan have; plan them again")
        found = []
        entries = [*document["backups"]]
        if len(entries) != plan.num_ranks:
            raise FormatError(f"{document.path}.backups has {len(entries)} entries for {plan.num_ranks} ranks")
        for rank, entry in enumerate(entries):
            if entry["lost"].integer(0) != rank:
                raise entry["lost"].wrong(f"{rank}, as there is one per rank in their order")
            backup = Plan.from_fields(entry["plan"])
            check_backup(backup, plan, num_replicas, [Place(0, rank)])
            makespan_us = simulate(backup).makespan_us
            found.append(Backup(rank, backup, makespan_us, entry["bound_us"].integer(0, makespan_us)))
        return cls(plan, num_replicas, tuple(found))


def digest_of(plan: Plan) -> str:
    """The SHA-256 of a plan, which identifies it."""
    return hashlib.sha256(plan.to_json().encode()).hexdigest()


# --- which ranks are left, and what they do ---------------------------------------------------------------------------


def survivors(num_ranks: int, num_replicas: int, lost: Collection[Place]) -> list[Place]:
    """The ranks that are left, in the order of a backup plan's ranks: replicas without a loss come last."""
    hit = {replica for replica, _ in lost}
    order = sorted(range(num_replicas), key=lambda replica: (replica not in hit, replica))
    everyone = (Place(replica, rank) for replica in order for rank in range(num_ranks))
    return [place for place in everyone if place not in lost]


def backup_placement(plan: Plan, num_replicas: int, lost: Collection[Place]) -> Placement:
    """All replicas' stages on the ranks that are left, as data streams of one placement.

    A stage of a lost rank is on ranks of other replicas that have the same stage: its micro-batches are shared out
    among as many of them as divide them evenly. Links between replicas are taken to be those between the same ranks
    within one.

    Args:
        plan: The plan of each replica.
        num_replicas: Number of replicas.
        lost: The ranks that are lost.

    Raises:
        PlacementError: A stage is on no rank that is left, a stage is on several ranks together, or micro-batches
            differ.
    """
    _refuse_unsupported(plan, num_replicas, lost)
    return _Merging(plan, num_replicas, lost).placement()


def _refuse_unsupported(plan: Plan, num_replicas: int, lost: Collection[Place]) -> None:
    placement = plan.placement
    placement.require_alike("a backup plan")
    if num_replicas < 2:
        raise PlacementError(f"num_replicas is {num_replicas}: a backup plan needs 2 replicas or more, such as --dp 2")
    for place in lost:
        if not (0 <= place.replica < num_replicas and 0 <= place.rank < plan.num_ranks):
            raise PlacementError(
                f"rank {place.rank} of replica {place.replica} is lost, but there are {num_replicas} replicas of "
                f"{plan.num_ranks} ranks"
            )
    for rank in range(plan.num_ranks):
        if {Place(replica, rank) for replica in range(num_replicas)} <= {*lost} and placement.stages_on(rank):
            raise PlacementError(
                f"rank {rank} is lost in every replica, so nobody has the weights of stage "
                f"{placement.stages_on(rank)[0]}; start from a checkpoint"
            )
    for task in placement.tasks:
        if len(task.ranks) > 1:
            raise PlacementError(
                f"stage {task.stage} is on the ranks {', '.join(map(str, task.ranks))} together, which no other rank "
                f"can stand in for; give --max-restarts instead"
            )
    if not any(task.kind.makes_weight_gradients for task in placement.tasks):
        raise PlacementError("the plan has forwards only; backup plans are for training")
    if plan.num_microbatches % placement.num_components:
        raise PlacementError(
            f"the plan has {plan.num_microbatches} micro-batches for {placement.num_components} data streams; backup "
            f"plans need the same number in each"
        )


class _Merging:
    """Where the tasks of all replicas are: copy k of replica r is unit r · copies + k of the merged placement."""

    def __init__(self, plan: Plan, num_replicas: int, lost: Collection[Place]) -> None:
        self.base, self.num_replicas, self.lost = plan.placement, num_replicas, {*lost}
        self.left = survivors(plan.num_ranks, num_replicas, lost)
        self.number = {place: i for i, place in enumerate(self.left)}
        hit = {replica for replica, _ in lost}
        self.replicas = sorted(range(num_replicas), key=lambda replica: (replica not in hit, replica))
        self.copies = self._num_copies(plan.num_microbatches)
        turn = count()
        #: The rank of each (unit, rank of the base).
        self.rank_of = {
            (unit, rank): self._rank(unit, rank, turn)
            for unit in range(num_replicas * self.copies)
            for rank in range(plan.num_ranks)
        }

    def _num_copies(self, num_microbatches: int) -> int:
        """Into how many streams each replica's micro-batches are dealt, so that several peers can share them."""
        if self.base.num_components > 1 or not self.lost:
            return 1
        lost_on = {place.rank for place in self.lost}
        peers = min(sum(place.rank == rank for place in self.left) for rank in lost_on)
        return max(k for k in range(1, peers + 1) if num_microbatches % k == 0)

    def _rank(self, unit: int, rank: int, turn: Iterator[int]) -> int:
        own = Place(self.replicas[unit // self.copies], rank)
        if own in self.number:
            return self.number[own]
        peers = [place for place in self.left if place.rank == rank]
        return self.number[peers[next(turn) % len(peers)]] if peers else 0

    def placement(self) -> Placement:
        base, num_tasks = self.base, len(self.base.tasks)
        num_stages = base.num_stages
        units = range(self.num_replicas * self.copies)
        tasks = [
            Task(
                unit * num_stages + task.stage,
                task.kind,
                (self.rank_of[unit, task.ranks[0]],),
                task.duration_us,
                task.held_bytes,
                task.peak_bytes,
            )
            for unit in units
            for task in base.tasks
        ]
        edges = [
            Edge(unit * num_tasks + edge.source, unit * num_tasks + edge.target, edge.num_bytes)
            for unit in units
            for edge in base.edges
        ]
        columns = {name: getattr(base, name) for name in ("static_bytes", "state_bytes", "snapshot_bytes")}
        of_left = {name: tuple(of[rank] for _, rank in self.left) for name, of in columns.items() if of}
        ends = tuple(self._step_ends(num_stages))
        edges_of_left, rows = tuple(edges), base.microbatch_rows
        return Placement(tuple(tasks), edges_of_left, self._cluster(), step_ends=ends, microbatch_rows=rows, **of_left)

    def _step_ends(self, num_stages: int) -> Iterator[StepEnd]:
        """Each rank reduces the gradients of a stage once, however many streams it has it in: after the last one."""
        seen: set[tuple[int, int]] = set()
        ends = {end.stage: end for end in self.base.step_ends}
        for unit in reversed(range(self.num_replicas * self.copies)):
            for stage, end in ends.items():
                where = self.rank_of[unit, self.base.gradient_ranks(stage)[0]], stage
                if where not in seen:
                    seen.add(where)
                    yield StepEnd(unit * num_stages + stage, end.reduce_us, end.optimizer_us)

    def _cluster(self) -> Cluster:
        base = self.base.cluster
        differing: dict[tuple[int, int], Link] = {}
        for route in self.base.routes:
            link = base.link_between(route.sender, route.receiver)
            for unit in range(self.num_replicas * self.copies):
                ends = self.rank_of[unit, route.sender], self.rank_of[unit, route.receiver]
                if link != base.link:
                    differing[ends] = link
        links = tuple((*ends, link) for ends, link in differing.items())
        shared = tuple(one for link in base.shared for one in self._shared(link))
        limits = tuple(base.limit_bytes[rank] for _, rank in self.left)
        return Cluster(limits, base.link, links, shared, base.gap_us)

    def _shared(self, link: SharedLink) -> Iterator[SharedLink]:
        """The same for each replica, which its ranks use for what they send, also to another replica."""
        receivers = tuple(self.number[place] for place in self.left if place.rank in link.receivers)
        for replica in self.replicas:
            mine = (self.number.get(Place(replica, rank)) for rank in link.senders)
            senders = tuple(rank for rank in mine if rank is not None)
            if senders and receivers:
                yield SharedLink(f"{link.name} of replica {replica}", link.bytes_per_us, senders, receivers)


def with_split_backward(placement: Placement) -> Placement:
    """Each whole backward halved into I and W, as `Costs.with_split_backward` does; what F kept is freed by W."""
    if all(task.kind is not Kind.B for task in placement.tasks):
        return placement
    tasks: list[Task] = []
    position: dict[int, int] = {}
    weights: list[tuple[int, Task]] = []
    for i, task in enumerate(placement.tasks):
        position[i] = len(tasks)
        if task.kind is not Kind.B:
            tasks.append(task)
            continue
        weight_us = task.duration_us // 2
        weights.append((len(tasks), replace(task, kind=Kind.W, duration_us=weight_us)))
        tasks.append(replace(task, kind=Kind.I, duration_us=task.duration_us - weight_us, held_bytes=0))
    edges = [edge._replace(source=position[edge.source], target=position[edge.target]) for edge in placement.edges]
    for source, weight in weights:
        edges.append(Edge(source, len(tasks)))
        tasks.append(weight)
    return replace(placement, tasks=tuple(tasks), edges=tuple(edges))


# --- the plan of the ranks that are left ------------------------------------------------------------------------------


def backup_placements(plan: Plan, num_replicas: int, lost: Collection[Place]) -> list[Placement]:
    """`backup_placement` as the plan has its backwards, and with split ones if they are whole."""
    whole = backup_placement(plan, num_replicas, lost)
    split = with_split_backward(whole)
    return [whole] if split is whole else [split, whole]


def as_backup(found: Plan, plan: Plan, num_replicas: int) -> Plan:
    """A plan of a backup placement with what the runtime needs: the cuts, and which streams are which replica's."""
    usage = None if plan.usage is None else replace(plan.usage, num_replicas=1)
    return replace(found, usage=usage, merged_replicas=num_replicas)


def plan_backup(plan: Plan, num_replicas: int, lost: Collection[Place]) -> Plan:
    """The fastest plan that list scheduling and the named schedules find for the ranks that are left.

    Args:
        plan: The plan of each replica.
        num_replicas: Number of replicas.
        lost: The ranks that are lost. Several may be, as long as every stage is left on one rank.

    Returns:
        A plan that `check` accepts, for the ranks of `survivors` in that order.

    Raises:
        PlacementError: `backup_placement` is not possible.
        PlanError: No plan fits in memory.
    """
    try:
        found = fastest_that_fits(backup_placements(plan, num_replicas, lost), plan.num_microbatches * num_replicas)
    except PlanError as error:
        where = ", ".join(f"rank {rank} of replica {replica}" for replica, rank in sorted(lost))
        raise PlanError(f"without {where} the step does not fit in memory: {error}", error.reason) from error
    return as_backup(found, plan, num_replicas)


def check_backup(backup: Plan, plan: Plan, num_replicas: int, lost: Sequence[Place]) -> None:
    """Check that `backup` is a plan for the ranks that are left, and that it can run.

    Raises:
        PlacementError: It has other tasks, edges or ranks than `backup_placement`.
        PlanError: `check` refuses it.
    """
    expected = backup_placements(plan, num_replicas, lost)
    num_microbatches = plan.num_microbatches * num_replicas
    if (
        backup.placement not in expected
        or backup.num_microbatches != num_microbatches
        or backup.merged_replicas != num_replicas
        or (backup.usage and backup.usage.cuts) != (plan.usage and plan.usage.cuts)
    ):
        raise PlacementError(
            f"the backup plan for {', '.join(f'rank {rank}' for _, rank in lost)} is not one for {num_replicas} "
            f"replicas of this plan; make it again with `rota plan --backups`"
        )
    check(backup)
