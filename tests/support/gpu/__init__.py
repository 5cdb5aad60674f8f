"""The tests on accelerators: what their ranks do, and how these are started.

A *job* is a function `job(rank, device, …)` that one rank runs; it returns plain numbers.
"""
