"""Plans run on `torch.distributed`: one process per rank, messages over Gloo, the planned order, all of it recorded.

Names are loaded when they are first used: `runtime.launching` starts ranks without torch.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
