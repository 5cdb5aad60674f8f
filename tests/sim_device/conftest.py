"""Registering a device changes autograd in a whole process: tests/test_sim_device.py runs these in one of their own."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "ROTA_SIM_DEVICE" in os.environ else ["test_*.py"]
