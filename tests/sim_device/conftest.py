"""Registering a device changes autograd in a whole process: tests/test_sim_device.py runs these in one of their own.

It must be registered before the first backward of a process, which starts autograd's threads: one per device. Processes
of the pool do that when they start.
"""

from __future__ import annotations

import os

if "ROTA_SIM_DEVICE" in os.environ:
    import support.sim_device  # noqa: F401

collect_ignore_glob = [] if "ROTA_SIM_DEVICE" in os.environ else ["test_*.py"]
