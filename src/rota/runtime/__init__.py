"""Plans run on `torch.distributed`: one process per rank, messages over Gloo, the planned order, all of it recorded."""

from rota.runtime import spmd
from rota.runtime.deferred import deferred_init, materialize
from rota.runtime.device.local import local_device
from rota.runtime.launcher_files import given_plan
from rota.runtime.meshes import local_stages, mesh
from rota.runtime.pipeline import Pipeline
from rota.runtime.step_handles import StepHandle

__all__ = [
    "Pipeline",
    "StepHandle",
    "deferred_init",
    "given_plan",
    "local_device",
    "local_stages",
    "materialize",
    "mesh",
    "spmd",
]
