"""Tessel's door: placements of blocks in, composed schedules out; the search is `rota.search.find_repeating`.

`schedule.schedplan` has `Block` and `SchedPlan`, `schedule.composer` has `Composer`, `cases` has `Placement`; the
command is `python -m rota.compat.tessel`.
"""
