"""autoplan, which chooses everything about a plan together."""

from rota.planning.answer import Answer
from rota.planning.autoplanning import autoplan
from rota.planning.deadline import Progress
from rota.planning.machine import Machine
from rota.planning.request import Choices

__all__ = ["Answer", "Choices", "Machine", "Progress", "autoplan"]
