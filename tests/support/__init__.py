"""Helpers of the tests, and small tools that look at the code itself."""
