from .engine import initialize as initialize
from .module import PipelineModule as PipelineModule
from .plans import to_plan as to_plan
from .specs import LayerSpec as LayerSpec, TiedLayerSpec as TiedLayerSpec
