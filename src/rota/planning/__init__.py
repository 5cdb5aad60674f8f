"""autoplan, which chooses everything about a plan together, and rehearsals of plans."""

from rota.planning.answer import Answer
from rota.planning.autoplanning import autoplan
from rota.planning.deadline import Progress
from rota.planning.machine import Machine

__all__ = ["Answer", "Machine", "Progress", "autoplan"]
