"""autoplan, which chooses everything about a plan together.

    on_this_machine   measure layers and links ─▶ autoplan ─▶ confirmation: real steps of the best plans ─▶ answer
    autoplanning      sweep: layouts ─▶ cuts ─▶ named schedules ─▶ finalists: searched orders ─▶ choosing ─▶ answer

`batch_planner` is for training: it plans each batch by itself.
"""

from rota.planning.answer import Answer
from rota.planning.autoplanning import autoplan
from rota.planning.deadline import Progress
from rota.planning.machine import Machine
from rota.planning.request import Choices

__all__ = ["Answer", "Choices", "Machine", "Progress", "autoplan"]
