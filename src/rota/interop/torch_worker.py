"""The process of a rank of `rota run --engine torch`: the user's script, in which `rota.Pipeline` is TorchEngine.

python -m rota.interop.torch_worker SCRIPT [ARGUMENT …]
"""

from __future__ import annotations

import logging

from rota import runtime
from rota.interop.torch_engine import TorchEngine
from rota.runtime.launching import worker

if __name__ == "__main__":
    vars(runtime)["Pipeline"] = TorchEngine  # where `rota.Pipeline` is looked up when it is first used
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # else it logs the whole schedule
    worker.main()
