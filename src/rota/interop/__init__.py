"""Other systems: the order of a plan for PyTorch's pipeline engine, traces of runs on it, layouts of other trainers.

Names are loaded when they are first used: traces and layouts can be read where torch is not installed.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
