"""Plans run on `torch.distributed`: one process a rank, exactly the planned order, everything recorded."""

from rota.runtime.pipeline import Pipeline, given_plan

__all__ = ["Pipeline", "given_plan"]
