"""What `rota autoplan` measures on this machine within its time limit: layers, links, and in the end steps of plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rota.core.errors import PipelineError
from rota.core.profiles import Profile
from rota.planning.answer import Answer
from rota.planning.confirmation import confirm
from rota.planning.deadline import Deadline
from rota.planning.machine import Machine
from rota.planning.model_file import ModelFile, profile_file
from rota.profiling.forked import why_not_here
from rota.profiling.machine_links import links_of_this_machine
from rota.runtime.device.local import CPU

_ROWS = (1, 2, 4, 8)  # of a micro-batch, by default
_PER_RANK = 2  # micro-batches of a step, without which a pipeline's ranks wait too much
_PROFILE = 0.4  # of the time limit, for measuring the layers at all numbers of rows that fit
_LINKS = 0.5  # of the time that is left then, for links that were never measured here; then for all-reduces
_LEAST_S = 0.2

Report = Callable[[object], None]


def profile_in_time(
    model_file: ModelFile,
    rows: Sequence[int],
    batch_rows: int,
    num_ranks: int,
    deadline: Deadline,
    report: Report,
    **how: Any,
) -> tuple[Profile, list[str]]:
    """The layers' costs, measured or estimated, and a remark on the numbers of rows for which there was no time.

    Args:
        model_file: The model.
        rows: Numbers of rows per micro-batch; none: the usual ones that divide the batch.
        batch_rows: Rows of a step.
        num_ranks: Ranks of a pipeline.
        deadline: The time limit for all that autoplan does.
        report: Called with what is being measured.
        **how: Further arguments of `profile_file`.
    """
    sizes = by_importance(rows or [size for size in _ROWS if batch_rows % size == 0], batch_rows, num_ranks)
    left_s = max(_PROFILE * deadline.seconds - deadline.elapsed_s, 0.0)
    profile = profile_file(model_file, sizes, report=report, within_s=left_s, **how)
    missing = ", ".join(map(str, sorted({*sizes} - {*profile})))
    remark = f"left out for lack of time: micro-batches of {missing} rows; give a longer --time-limit"
    return profile, [remark] if missing else []


def by_importance(sizes: Sequence[int], batch_rows: int, num_ranks: int) -> list[int]:
    """The largest size of which each rank of a pipeline gets two or more, the smallest, then the others, largest first.

    Large micro-batches make ops efficient, and the first of them is measured even if no time is left for others.
    """
    ascending = sorted({*sizes})
    largest = max((rows for rows in ascending if batch_rows >= _PER_RANK * num_ranks * rows), default=ascending[0])
    return list(dict.fromkeys([largest, ascending[0], *reversed(ascending)]))


def with_links(
    machine: Machine, cache: str | None, refresh: bool, deadline: Deadline, report: Report
) -> tuple[Machine, str, list[str]]:
    """The machine with links between CPUs of this one, on which plans are tried; why they were not measured; remarks.

    `cache`: a folder for links, or a file that is for layers alone.
    """
    if why_not_here(machine.num_ranks):
        return machine, "this takes a core per rank", []
    report("measuring the links between processes")
    try:
        links = links_of_this_machine(
            machine.num_ranks,
            device=CPU,
            cache=cache if cache is not None and not cache.endswith(".json") else None,
            refresh=refresh,
            report=report,
            within_s=_LINKS * deadline.left_s,
        )
    except PipelineError as error:
        return machine, str(error), []
    doubts = [f"links were measured on a busy machine: {links.doubt}"] if links.doubt else []
    return replace(machine, link=links.cluster), "", doubts


def confirmed_in_time(
    answer: Answer, model_file: ModelFile, deadline: Deadline, report: Report, elsewhere: str = ""
) -> Answer:
    """The answer of `confirm`, in the time that is left once the model is made."""
    report("making the model")
    functions = model_file.make_batch, model_file.loss_fn, model_file.make_optimizer
    model = model_file.make_model()  # which may take long
    time_limit_s = max(deadline.left_s, _LEAST_S)
    return confirm(answer, model, *functions, report=report, time_limit_s=time_limit_s, elsewhere=elsewhere)
