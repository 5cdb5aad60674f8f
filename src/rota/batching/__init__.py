"""Every batch its own plan: from samples' lengths to micro-batches, their order, each rank's schedule, and a bound."""

from rota.batching.bounds import BatchBound
from rota.batching.planning import is_compiled, plan_batch, plan_replicas
from rota.batching.result import BatchPlan

__all__ = ["BatchBound", "BatchPlan", "is_compiled", "plan_batch", "plan_replicas"]
