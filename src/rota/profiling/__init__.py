"""Costs of a model's layers, its stages and links between processes, measured where the model will run."""

from rota.profiling.devices import DEVICES, DeviceModel
from rota.profiling.layer_measurement import ProfileOptions
from rota.profiling.layer_profile import profile_layers, profile_model
from rota.profiling.links import measure_links
from rota.profiling.machine_links import links_of_this_machine
from rota.profiling.stage_profile import StageProfileOptions, profile, profile_chunks

__all__ = [
    "DEVICES",
    "DeviceModel",
    "ProfileOptions",
    "StageProfileOptions",
    "links_of_this_machine",
    "measure_links",
    "profile",
    "profile_chunks",
    "profile_layers",
    "profile_model",
]
