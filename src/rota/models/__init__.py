"""Models as stages: mark where a model may be cut, cut it, or wire its pieces by hand."""

from __future__ import annotations

from rota.models.added_losses import AddedLoss, AddedLosses, add_loss, collect_losses
from rota.models.cutpoint import CutPoint
from rota.models.local import keep_local
from rota.models.splitting import finest, split
from rota.models.stage_edges import StageEdge
from rota.models.stages import Stages

__all__ = [
    "AddedLoss",
    "AddedLosses",
    "CutPoint",
    "StageEdge",
    "Stages",
    "add_loss",
    "collect_losses",
    "finest",
    "keep_local",
    "split",
]
