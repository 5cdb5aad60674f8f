"""Models as stages: mark where a model may be cut, cut it, or wire its pieces by hand."""

from __future__ import annotations

from rota.models.added_losses import AddedLoss, AddedLosses, add_loss, collect_losses
from rota.models.cutpoint import CutPoint
from rota.models.packing import pack_samples, packed_attention, use_packed_attention
from rota.models.sequence_chunks import chunk_start, with_earlier_chunks
from rota.models.splitting import finest, is_sequential, split
from rota.models.stage_edges import StageEdge
from rota.models.stages import Stages

__all__ = [
    "AddedLoss",
    "AddedLosses",
    "CutPoint",
    "StageEdge",
    "Stages",
    "add_loss",
    "chunk_start",
    "collect_losses",
    "finest",
    "is_sequential",
    "pack_samples",
    "packed_attention",
    "split",
    "use_packed_attention",
    "with_earlier_chunks",
]
