"""Every run of the property tests draws the same examples, and none of them is timed. Ctrl-C can be tested anywhere."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("rota", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rota")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
