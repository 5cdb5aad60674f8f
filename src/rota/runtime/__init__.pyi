from . import spmd as spmd
from .device.local import local_device as local_device
from .launcher_files import given_plan as given_plan
from .materializing import materialize as materialize, meta_init as meta_init
from .meshes import local_stages as local_stages, mesh as mesh
from .pipeline import Pipeline as Pipeline
from .step_results import StepHandle as StepHandle
