from .auto_config import AutoConfig as AutoConfig
from .profiler import Profiler as Profiler
from .varuna import CutPoint as CutPoint, Varuna as Varuna
