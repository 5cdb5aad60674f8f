"""autoplan, which chooses everything about a plan together.

    plan_here   measure layers and links ─▶ autoplan ─▶ confirmation: real steps of the best plans ─▶ answer
    autoplan    sweep: layouts ─▶ cuts ─▶ named schedules ─▶ searched orders of finalists ─▶ choosing ─▶ answer

`batch_planner` is for training: it plans each batch by itself.
"""

from rota.planning.answer import Answer
from rota.planning.autoplanning import autoplan
from rota.planning.machine import Machine
from rota.planning.request import Choices, Progress

__all__ = ["Answer", "Choices", "Machine", "Progress", "autoplan"]
