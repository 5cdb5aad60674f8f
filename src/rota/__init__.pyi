from . import drawing as drawing, interop as interop, schedules as schedules, shapes as shapes
from .accounting import Cause as Cause, Explanation as Explanation, Idle as Idle, explain as explain, idle as idle
from .accounting.comparison import Comparison as Comparison, compare as compare
from .batching import (
    BatchBound as BatchBound,
    BatchPlan as BatchPlan,
    plan_batch as plan_batch,
    plan_replicas as plan_replicas,
)
from .calibration import (
    Calibration as Calibration,
    calibrate as calibrate,
    calibrated as calibrated,
    fit_sizes as fit_sizes,
)
from .core.cluster import AllReduceTimes as AllReduceTimes, Cluster as Cluster, Link as Link, SharedLink as SharedLink
from .core.costs import Costs as Costs
from .core.errors import (
    FormatError as FormatError,
    LostRankError as LostRankError,
    PipelineError as PipelineError,
    PlacementError as PlacementError,
    PlanError as PlanError,
    RotaError as RotaError,
    ScheduleError as ScheduleError,
    SearchError as SearchError,
    SplitError as SplitError,
)
from .core.layers import LayerCosts as LayerCosts, Profile as Profile
from .core.placement import Placement as Placement
from .core.placing import bidirectional as bidirectional, interleaved as interleaved, place as place, wave as wave
from .core.plan import Plan as Plan
from .core.programs.device_order import DeviceOrder as DeviceOrder, check_device_order as check_device_order
from .core.simulation import check as check, simulate as simulate
from .core.sizes import Curve as Curve, Size as Size, SizeModel as SizeModel
from .core.tasks import Edge as Edge, Kind as Kind, Op as Op, StepEnd as StepEnd, Task as Task, Transfer as Transfer
from .core.timeline import Span as Span, Timeline as Timeline
from .drawing import draw as draw
from .models import (
    CutPoint as CutPoint,
    Stages as Stages,
    add_loss as add_loss,
    chunk_start as chunk_start,
    collect_losses as collect_losses,
    pack_samples as pack_samples,
    packed_attention as packed_attention,
    split as split,
    use_packed_attention as use_packed_attention,
    with_earlier_chunks as with_earlier_chunks,
)
from .planning import Choices as Choices, Machine as Machine, autoplan as autoplan
from .planning.batch_planner import PlannedBatch as PlannedBatch, Planner as Planner
from .profiling import (
    ProfileOptions as ProfileOptions,
    StageProfileOptions as StageProfileOptions,
    profile as profile,
    profile_chunks as profile_chunks,
    profile_layers as profile_layers,
)
from .runtime import (
    Pipeline as Pipeline,
    StepHandle as StepHandle,
    given_plan as given_plan,
    local_device as local_device,
    local_stages as local_stages,
    materialize as materialize,
    mesh as mesh,
    meta_init as meta_init,
    spmd as spmd,
)
from .runtime.checkpoints import Checkpoints as Checkpoints
from .runtime.checkpoints.weights import gather_weights as gather_weights
from .runtime.pretrained import load_pretrained as load_pretrained
from .search import SearchResult as SearchResult, find_frontier as find_frontier, find_plan as find_plan
from .verifying import Verification as Verification, verify as verify

__version__: str
