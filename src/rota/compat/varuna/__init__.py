"""Varuna, on Rota: CutPoints in a model, `Varuna` to train it in stages, `Profiler` and `AutoConfig` to choose them.

What needs torch is loaded when it is first used.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
