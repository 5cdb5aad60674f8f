"""Rehearsals: a plan run with real processes and real messages, and timed waits in place of compute.

rehearse ──▶ processes ──▶ server ──▶ rank 0, rank 1, …      allocation: the bytes that a rank holds
    ◀── outcome ◀──────────────────────────┘                 timed_waits, spin_kernels: what is in place of compute
"""

from rota.planning.rehearsal.outcome import Rehearsal
from rota.planning.rehearsal.rehearsing import rehearse

__all__ = ["Rehearsal", "rehearse"]
