from .engine import initialize as initialize
from .layers import LayerSpec as LayerSpec, TiedLayerSpec as TiedLayerSpec
from .module import PipelineModule as PipelineModule
from .plans import to_plan as to_plan
