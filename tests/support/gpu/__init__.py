"""The tests on accelerators: what their ranks do, and how these are started.

A *job* is a function `job(rank, device, …)` that one rank runs; it returns plain numbers. `tests/gpu` runs the jobs on
accelerators. Elsewhere the same jobs run on simulated devices (`tests/sim_device/test_gpu_jobs.py`) and on the CPU
(`ROTA_GPU_TESTS=cpu`), so that it is known that the tests themselves work.
"""
