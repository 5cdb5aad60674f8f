"""Plans run on `torch.distributed`: one process per rank, messages over Gloo, the planned order, all of it recorded."""

from rota.runtime import spmd
from rota.runtime.launcher_files import given_plan
from rota.runtime.meshes import mesh
from rota.runtime.pipeline import Pipeline

__all__ = ["Pipeline", "given_plan", "mesh", "spmd"]
