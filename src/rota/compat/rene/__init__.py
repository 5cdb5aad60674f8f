"""René on Rota: a schedule's instructions as a graph, when each one may run, and pictures."""

from rota.compat.rene.dag import ReneDAG, backward_dep, forward_dep
from rota.compat.rene.instruction import (
    Backward,
    EarlyRecomputation1F1B,
    Forward,
    ForwardBackward,
    Instruction,
    PipelineSchedule,
    Recomputation,
    ReneError,
    Synchronous1F1B,
)
from rota.compat.rene.visualizer import (
    DEFAULT_ANNOTATION_ARGS,
    DEFAULT_LINE_ARGS,
    DEFAULT_RECTANGLE_ARGS,
    PipelineVisualizer,
)

__all__ = [
    "DEFAULT_ANNOTATION_ARGS",
    "DEFAULT_LINE_ARGS",
    "DEFAULT_RECTANGLE_ARGS",
    "Backward",
    "EarlyRecomputation1F1B",
    "Forward",
    "ForwardBackward",
    "Instruction",
    "PipelineSchedule",
    "PipelineVisualizer",
    "Recomputation",
    "ReneDAG",
    "ReneError",
    "Synchronous1F1B",
    "backward_dep",
    "forward_dep",
]
