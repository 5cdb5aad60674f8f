"""Steps with plans of their own hold no more than these plans say, wherever the longest sample is in the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

import rota
from rota import Cluster, Pipeline, Placement, Plan, Size, SizeModel, place, simulate
from rota.runtime.memory_watch import MemoryWatch
from rota.schedules import NAMED
from runtime.test_memory_as_planned import patient
from support.pool import Pool
from support.text_models import LONGEST, WIDTH, gpt_stages, summed_loss, tokens

pytestmark = pytest.mark.dist

NUM_RANKS, SHORT = 2, 6
Job = tuple[Plan, list[tuple[int, int]]]  # with rows and length of each micro-batch


def slack_bytes(sizes: list[tuple[int, int]]) -> int:
    """A value between two ranks arrives or leaves a little earlier or later than planned."""
    return max(rows * length for rows, length in sizes) * WIDTH * 8


def measured_model() -> SizeModel:
    with mock.patch("rota.profiling.stage_profile._RUN_NS", 0):
        return rota.profile_sizes(
            gpt_stages(NUM_RANKS), tokens, summed_loss, lengths=(SHORT, 12, LONGEST), rows=(1, 3), here=True, repeats=1
        )


def watched(rank: int, base: Plan, jobs: list[Job]) -> list[tuple[int, int, int]]:
    """For each job, the most bytes that this rank planned to hold, may hold, and held, all without static bytes."""
    found = []
    with Pipeline(gpt_stages(NUM_RANKS), base, summed_loss, check_data="never") as pipeline:
        for plan, sizes in jobs:
            inputs, targets = zip(*(tokens(*size, seed=m) for m, size in enumerate(sizes)), strict=True)
            given: dict[str, Any] = {"plan": plan, "sizes": sizes}
            pipeline.step([*inputs], [*targets], **given)
            for parameter in pipeline.parameters():
                parameter.grad = None
            static, limit = plan.placement.static_bytes[rank], plan.placement.cluster.limit_bytes[rank]
            assert limit is not None
            allowed = limit - static + slack_bytes(sizes)
            with pipeline.watch_memory() as watch, mock.patch.object(MemoryWatch, "op_ended", patient(allowed)):
                pipeline.step([*inputs], [*targets], **given)
            found.append((simulate(plan).peak_memory_bytes[rank] - static, limit - static, watch.peak_bytes))
    return found


def with_one_long(model: SizeModel, schedule: str, where: int) -> Job:
    """Micro-batches of one short sample each, and one of the longest. The limits are what the plan needs."""
    cluster = Cluster.uniform(NUM_RANKS, latency_us=100)
    sizes = [(1, LONGEST if m == where else SHORT) for m in range(5)]
    placements = [place(model.costs(Size.padded([length])), cluster) for length in (SHORT, LONGEST)]
    placement = Placement.of_classes(placements, [int(length == LONGEST) for _, length in sizes])
    plan = NAMED[schedule](placement, len(sizes))
    limited = replace(cluster, limit_bytes=simulate(plan).peak_memory_bytes)
    return replace(plan, placement=replace(placement, cluster=limited)), sizes


def planned_batch(model: SizeModel, lengths: list[int]) -> Job:
    """A planned batch, in little more memory than the longest sample needs alone."""
    with pytest.raises(rota.SearchError, match=f"sample 0 of length {LONGEST} fits in no micro-batch") as refusal:
        rota.plan_batch(model, Cluster.uniform(NUM_RANKS, max(model.static_bytes)), lengths)
    need = int(str(refusal.value).split("alone it needs ")[1].split()[0])
    cluster = Cluster.uniform(NUM_RANKS, need + need // 4, latency_us=100)
    found = rota.plan_batch(model, cluster, lengths, tries=200)
    assert all(peak <= limit for peak, limit in zip(found.timeline.peak_memory_bytes, cluster.limit_bytes, strict=True))
    return found.plan, [(len(group), max(lengths[i] for i in group)) for group in found.groups]


def test_limits_hold_wherever_the_longest_sample_is(pool: Pool) -> None:
    model = measured_model()
    places = [(schedule, where) for schedule in ("1f1b", "gpipe") for where in range(5)]
    jobs = [with_one_long(model, *place) for place in places]
    peaks = [simulate(plan).peak_memory_bytes[0] for plan, _ in jobs]
    assert len({*peaks[:5]}) > 1  # there is a worst place
    jobs.append(planned_batch(model, [LONGEST, *range(4, 20)]))
    base = NAMED["1f1b"](place(model.costs(Size(1, 1)), Cluster.uniform(NUM_RANKS)), 2)
    for rank, of_rank in enumerate(pool.run(NUM_RANKS, watched, base, jobs)):
        for (planned, limit, held), (_, sizes) in zip(of_rank, jobs, strict=True):
            assert 0.6 * planned <= held <= limit + slack_bytes(sizes), (rank, sizes, planned, limit, held)
