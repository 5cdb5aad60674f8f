"""Whether a plan's memory has room for the states that `rota run --max-restarts` keeps of each rank, in a sentence."""

from __future__ import annotations

from rota.core.costs import NUM_SNAPSHOTS
from rota.core.timeline import Timeline
from rota.core.units import size_text


def in_host_memory(device: str) -> str:
    """Why the memory of an accelerator has none of these states, and what to do."""
    return (
        f"snapshots are in the host's memory, and the limit is that of {device}; leave --snapshots out, and give each "
        f"host memory for two copies of its ranks' weights and optimizer state"
    )


def snapshots_text(timeline: Timeline) -> str:
    """A line for reports; "" if nothing is known of their size, or if no limit says what room there is.

    "" as well for plans that are estimated for another device or to be exported, unless they count snapshots.
    """
    placement = timeline.plan.placement
    limits = placement.cluster.limit_bytes
    if placement.snapshot_bytes:
        most = size_text(max(placement.snapshot_bytes))
        return f"Included in the memory: snapshots for restarts, up to {most} per rank."
    usage = timeline.plan.usage
    if usage is not None and (usage.exportable or usage.is_estimate):
        return ""
    needed = [NUM_SNAPSHOTS * size for size in placement.state_bytes]
    if not needed or all(limit is None for limit in limits):
        return ""
    most = size_text(max(needed))
    text = f"Not included in the memory: snapshots for restarts, up to {most} per rank in the host's memory."
    peaks = timeline.peak_memory_bytes
    left = {rank: limit - peaks[rank] for rank, limit in enumerate(limits) if limit is not None}
    rank = min(left, key=lambda rank: left[rank] - needed[rank])
    if left[rank] >= needed[rank]:
        return f"{text} They fit within the limits as well."
    return (
        f"{text} On CPUs, the limit of rank {rank} leaves {size_text(left[rank])}, but the snapshots need "
        f"{size_text(needed[rank])}: restarts go on from the last checkpoint, unless you plan with --snapshots."
    )
