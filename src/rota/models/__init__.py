"""Models as stages: mark where a model may be cut, cut it, or wire its pieces by hand."""

from __future__ import annotations

from rota.models.cutpoint import CutPoint
from rota.models.local import keep_local
from rota.models.splitting import finest, is_marked, split
from rota.models.stage_edges import StageEdge
from rota.models.stages import Stages

__all__ = ["CutPoint", "StageEdge", "Stages", "finest", "is_marked", "keep_local", "split"]
