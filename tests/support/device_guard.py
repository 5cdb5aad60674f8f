"""The simulated device below PyTorch: `device_guard.cpp`, which makes `torch.Stream` and `torch.Event` ask Python.

It is compiled by the first process that needs it, in some seconds, and kept in build/ for this version of PyTorch.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from support import ROOT

#: What device_guard.cpp asks, in its order, of an event or 0, and a stream or another event.
ASKED = ("new_stream", "record", "record_timed", "wait", "is_done", "host_waits", "host_waits_for_all", "elapsed")
ASKED += ("forget", "peak_bytes", "reset_peak")
NO_TIME = -1

_SOURCE = Path(__file__).with_suffix(".cpp")
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


#: The C++ compiler; None if there is none.
COMPILER = shutil.which(os.environ.get("CXX", "c++"))


def load(answers: Mapping[str, Callable[[int, int], int]]) -> ctypes.CDLL:
    """Register the device with PyTorch. From now on it asks `answers`, by the names in `ASKED`."""
    library = ctypes.CDLL(str(_built()))
    library.current_stream.restype = ctypes.c_int64
    functions = [answers[name] for name in ASKED]

    @_FUNCTION
    def answer(ask: int, first: int, second: int) -> int:
        try:
            return functions[ask](first, second)
        except BaseException:  # C++ would go on as if nothing had happened
            traceback.print_exc()
            os._exit(70)

    library.set_answer(answer)
    library.answer = answer  # lives as long as the library
    atexit.register(library.set_answer, None)
    library.register_device()
    return library


def _built() -> Path:
    """The library, built if it is not there."""
    torch_folder = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-attributes", f"-I{torch_folder}/include"]
    flags += [f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    text = f"{_SOURCE.read_text()}{torch.__version__}{torch_folder}{flags}"
    path = ROOT / "build" / f"sim-device-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        assert COMPILER is not None, "the simulated device needs a C++ compiler: c++, or what $CXX names"
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        done = subprocess.run([COMPILER, str(_SOURCE), "-o", str(unfinished), *flags], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        unfinished.rename(path)  # another process may have been faster
    return path
