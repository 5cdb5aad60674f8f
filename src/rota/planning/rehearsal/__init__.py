"""Rehearsals: a plan run with real processes and real messages, and timed waits instead of compute.

rehearse ──▶ processes ──▶ server ──▶ rank 0, rank 1, …      allocation: the bytes that a rank holds
    ◀── outcome ◀──────────────────────────┘                 timed_waits, spin_kernels: what is instead of compute
"""

from rota.planning.rehearsal.outcome import BatchesRehearsal, Rehearsal
from rota.planning.rehearsal.rehearsing import rehearse, rehearse_batches

__all__ = ["BatchesRehearsal", "Rehearsal", "rehearse", "rehearse_batches"]
