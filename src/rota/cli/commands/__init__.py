"""The commands of `rota`, one file each: its arguments and what it does. Heavy libraries are imported inside `run`."""

from rota.cli.commands import (
    autoplan,
    bench_search,
    bound,
    calibrate,
    check,
    checkpoint,
    compare,
    completion,
    demo,
    doctor,
    explain,
    export,
    frontier,
    import_plan,
    import_trace,
    plan,
    plan_batch,
    profile,
    run,
    schedules,
    show,
    simulate,
    verify,
)

_IN_ORDER = (
    *(demo, doctor, autoplan, profile, plan, plan_batch, schedules),
    *(bound, frontier, check, simulate, show, explain, verify),
    *(run, compare, calibrate, import_trace, export, import_plan, checkpoint, bench_search, completion),
)
#: In the order of `rota --help`.
COMMANDS = tuple(module.COMMAND for module in _IN_ORDER)
