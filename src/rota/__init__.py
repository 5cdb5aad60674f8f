"""Rota: cut a PyTorch model into stages, find and prove its best pipeline schedule, run it exactly as planned.

    costs = rota.Costs.uniform(num_stages=4, forward_us=100, backward_us=200)
    plan = rota.schedules.one_f_one_b(rota.place(costs, rota.Cluster.uniform(4)), num_microbatches=8)
    rota.check(plan)
    print(rota.simulate(plan).makespan_us)

Names are loaded when they are first used: importing rota loads neither torch nor any other heavy library.
"""

from __future__ import annotations

import os
from typing import Any

import lazy_loader

# Where colorama is installed, numba colours each error that it handles while it compiles, and for that sets sys.stdout
# and sets it back. Rota compiles in a thread: a redirect_stdout that begins meanwhile elsewhere would be undone.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # __init__.pyi has all names


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("rota")
    return _load(name)
