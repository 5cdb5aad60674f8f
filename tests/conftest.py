"""Every run of the property tests draws the same examples, and none of them is timed."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("rota", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rota")
