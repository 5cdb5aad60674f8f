"""Rota: cut a PyTorch model into stages, find and prove its best pipeline schedule, run it exactly as planned.

    costs = rota.Costs.uniform(num_stages=4, forward_us=100, backward_us=200)
    plan = rota.schedules.one_f_one_b(rota.place(costs, rota.Cluster.uniform(4)), num_microbatches=8)
    rota.check(plan)
    print(rota.simulate(plan).makespan_us)

Names are loaded when they are first used: importing rota loads neither torch nor any other heavy library.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Where colorama is installed, numba colours each error that it handles while it compiles, and for that sets sys.stdout
# and sets it back. Rota compiles in a thread: a redirect_stdout that begins meanwhile elsewhere would be undone.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

_HOMES = {
    "rota.core.tasks": ("Kind", "Op", "Task", "Transfer"),
    "rota.core.cluster": ("AllReduceTimes", "Cluster", "Link", "SharedLink"),
    "rota.core.costs": ("Costs",),
    "rota.core.layers": ("LayerCosts",),
    "rota.core.sizes": ("Curve", "Size", "SizeModel"),
    "rota.core.profiles": ("Profile",),
    "rota.core.placement": ("Edge", "Placement", "StepEnd"),
    "rota.core.placing": ("bidirectional", "interleaved", "place", "wave"),
    "rota.core.plan": ("Plan",),
    "rota.core.timeline": ("Span", "Timeline"),
    "rota.core.checking": ("check",),
    "rota.core.simulation": ("simulate",),
    "rota.core.programs.device_order": ("DeviceOrder", "check_device_order"),
    "rota.accounting": ("Cause", "Explanation", "Idle", "explain", "idle"),
    "rota.accounting.comparison": ("Comparison", "compare"),
    "rota.calibration": ("Calibration", "calibrate", "calibrated", "fit_sizes"),
    "rota.core.errors": (
        "FormatError",
        "LostRankError",
        "PipelineError",
        "PlacementError",
        "PlanError",
        "RotaError",
        "ScheduleError",
        "SearchError",
        "SplitError",
    ),
    "rota.search": ("SearchResult", "find_frontier", "find_plan"),
    "rota.batching": ("BatchBound", "BatchPlan", "plan_batch", "plan_replicas"),
    "rota.models": (
        *("CutPoint", "Stages", "add_loss", "chunk_start", "collect_losses", "pack_samples"),
        *("packed_attention", "split", "use_packed_attention", "with_earlier_chunks"),
    ),
    "rota.profiling": ("profile", "profile_chunks", "profile_layers", "profile_sizes"),
    "rota.runtime": (
        *("Pipeline", "StepHandle", "given_plan", "local_device", "local_stages", "materialize", "mesh", "meta_init"),
        "spmd",
    ),
    "rota.runtime.pretrained": ("load_pretrained",),
    "rota.runtime.checkpoints": ("Checkpoints",),
    "rota.runtime.checkpoints.gathering": ("gather_weights",),
    "rota.verifying": ("Verification", "verify"),
    "rota.planning": ("Machine", "autoplan"),
    "rota.planning.planner": ("PlannedBatch", "Planner"),
    "rota.drawing": ("draw",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_ROOMS = ("drawing", "interop", "schedules", "shapes")

__all__ = ["__version__", *sorted(_HOME_OF), *_ROOMS]

if TYPE_CHECKING:
    __version__: str
    from rota import drawing as drawing
    from rota import interop as interop
    from rota import schedules as schedules
    from rota import shapes as shapes
    from rota.accounting import Cause as Cause
    from rota.accounting import Explanation as Explanation
    from rota.accounting import Idle as Idle
    from rota.accounting import explain as explain
    from rota.accounting import idle as idle
    from rota.accounting.comparison import Comparison as Comparison
    from rota.accounting.comparison import compare as compare
    from rota.batching import BatchBound as BatchBound
    from rota.batching import BatchPlan as BatchPlan
    from rota.batching import plan_batch as plan_batch
    from rota.batching import plan_replicas as plan_replicas
    from rota.calibration import Calibration as Calibration
    from rota.calibration import calibrate as calibrate
    from rota.calibration import calibrated as calibrated
    from rota.calibration import fit_sizes as fit_sizes
    from rota.core.checking import check as check
    from rota.core.cluster import AllReduceTimes as AllReduceTimes
    from rota.core.cluster import Cluster as Cluster
    from rota.core.cluster import Link as Link
    from rota.core.cluster import SharedLink as SharedLink
    from rota.core.costs import Costs as Costs
    from rota.core.errors import FormatError as FormatError
    from rota.core.errors import LostRankError as LostRankError
    from rota.core.errors import PipelineError as PipelineError
    from rota.core.errors import PlacementError as PlacementError
    from rota.core.errors import PlanError as PlanError
    from rota.core.errors import RotaError as RotaError
    from rota.core.errors import ScheduleError as ScheduleError
    from rota.core.errors import SearchError as SearchError
    from rota.core.errors import SplitError as SplitError
    from rota.core.layers import LayerCosts as LayerCosts
    from rota.core.placement import Edge as Edge
    from rota.core.placement import Placement as Placement
    from rota.core.placement import StepEnd as StepEnd
    from rota.core.placing import bidirectional as bidirectional
    from rota.core.placing import interleaved as interleaved
    from rota.core.placing import place as place
    from rota.core.placing import wave as wave
    from rota.core.plan import Plan as Plan
    from rota.core.profiles import Profile as Profile
    from rota.core.programs.device_order import DeviceOrder as DeviceOrder
    from rota.core.programs.device_order import check_device_order as check_device_order
    from rota.core.simulation import simulate as simulate
    from rota.core.sizes import Curve as Curve
    from rota.core.sizes import Size as Size
    from rota.core.sizes import SizeModel as SizeModel
    from rota.core.tasks import Kind as Kind
    from rota.core.tasks import Op as Op
    from rota.core.tasks import Task as Task
    from rota.core.tasks import Transfer as Transfer
    from rota.core.timeline import Span as Span
    from rota.core.timeline import Timeline as Timeline
    from rota.drawing import draw as draw
    from rota.models import CutPoint as CutPoint
    from rota.models import Stages as Stages
    from rota.models import add_loss as add_loss
    from rota.models import chunk_start as chunk_start
    from rota.models import collect_losses as collect_losses
    from rota.models import pack_samples as pack_samples
    from rota.models import packed_attention as packed_attention
    from rota.models import split as split
    from rota.models import use_packed_attention as use_packed_attention
    from rota.models import with_earlier_chunks as with_earlier_chunks
    from rota.planning import Machine as Machine
    from rota.planning import autoplan as autoplan
    from rota.planning.planner import PlannedBatch as PlannedBatch
    from rota.planning.planner import Planner as Planner
    from rota.profiling import profile as profile
    from rota.profiling import profile_chunks as profile_chunks
    from rota.profiling import profile_layers as profile_layers
    from rota.profiling import profile_sizes as profile_sizes
    from rota.runtime import Pipeline as Pipeline
    from rota.runtime import StepHandle as StepHandle
    from rota.runtime import given_plan as given_plan
    from rota.runtime import local_device as local_device
    from rota.runtime import local_stages as local_stages
    from rota.runtime import materialize as materialize
    from rota.runtime import mesh as mesh
    from rota.runtime import meta_init as meta_init
    from rota.runtime import spmd as spmd
    from rota.runtime.checkpoints import Checkpoints as Checkpoints
    from rota.runtime.checkpoints.gathering import gather_weights as gather_weights
    from rota.runtime.pretrained import load_pretrained as load_pretrained
    from rota.search import SearchResult as SearchResult
    from rota.search import find_frontier as find_frontier
    from rota.search import find_plan as find_plan
    from rota.verifying import Verification as Verification
    from rota.verifying import verify as verify


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"rota.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("rota")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rota' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
