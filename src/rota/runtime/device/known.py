"""What Rota knows of types of accelerators and PyTorch does not say of all of them alike: the only names of types.

Nothing here loads PyTorch, which may be missing where versions are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Known(NamedTuple):
    """What is known of a type.

    `visible`: the environment variables that choose which devices a process sees. `libraries`: what PyTorch was built
    with, and the attribute of `torch` that has the version, or returns it.
    """

    visible: tuple[str, ...]
    libraries: Mapping[str, str]


#: By PyTorch's name of the type. What is not here runs, too.
KNOWN = {
    "cuda": Known(
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        {"CUDA": "version.cuda", "ROCm": "version.hip", "NCCL": "cuda.nccl.version"},
    ),
    "xpu": Known(("ZE_AFFINITY_MASK",), {"XPU": "version.xpu"}),
}
