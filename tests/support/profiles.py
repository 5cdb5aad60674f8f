"""Profiles, with their options as keyword arguments."""

from dataclasses import fields
from typing import Any

from rota import Costs, LayerCosts, Profile, ProfileOptions, StageProfileOptions
from rota.profiling import layer_profile, stage_profile

STAGE_OPTIONS = {field.name for field in fields(StageProfileOptions)}


def profile(*arguments: Any, **options: Any) -> Costs:
    how = {name: options.pop(name) for name in STAGE_OPTIONS & options.keys()}
    return stage_profile.profile(*arguments, **options, options=StageProfileOptions(**how))


def profile_layers(model: Any, batch: Any, target: Any = None, loss_fn: Any = None, **options: Any) -> LayerCosts:
    return layer_profile.profile_layers(model, batch, target, loss_fn, ProfileOptions(**options))


def profile_model(model: Any, make_batch: Any, rows: Any, loss_fn: Any, **options: Any) -> Profile:
    return layer_profile.profile_model(model, make_batch, rows, loss_fn, ProfileOptions(**options))
