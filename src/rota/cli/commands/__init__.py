"""The commands of `rota`, one file each: its arguments and what it does. Heavy libraries are imported inside `run`."""

from rota.cli.commands import (
    autoplan,
    calibrate,
    check,
    checkpoint,
    compare,
    demo,
    doctor,
    explain,
    export,
    import_plan,
    plan,
    plan_batch,
    profile,
    run,
    schedules,
    show,
    verify,
)

_IN_ORDER = (
    *(demo, doctor, autoplan, profile, plan, plan_batch, schedules),
    *(check, show, explain, verify),
    *(run, compare, calibrate, export, import_plan, checkpoint),
)
#: In the order of `rota --help`.
COMMANDS = tuple(module.COMMAND for module in _IN_ORDER)
