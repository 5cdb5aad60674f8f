"""Tessel on Rota: placements of blocks in, composed schedules out, by `rota.search.find_repeating`.

`schedule.schedplan` has `Block` and `SchedPlan`, `schedule.composer` has `Composer`, `cases` has `Placement`; the
command is `python -m rota.compat.tessel`.
"""
