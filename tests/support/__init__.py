"""Helpers of the tests, and small tools that look at the code itself."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository
