"""DeepSpeed's pipeline parallelism on Rota: `schedule`, `topology`, `utils` and `module` as DeepSpeed has them.

`to_plan` makes a Plan of any PipeSchedule. What needs torch is imported when it is first used.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
