"""A model's costs by the size of a micro-batch: its layers profiled at several lengths, cut into stages, and fitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rota.calibration.size_fit import fit_sizes
from rota.core.sizes import Size, SizeModel
from rota.cutting import cut
from rota.planning.model_file import load_model_file, profile_file


class SizeProfile(NamedTuple):
    """The costs of stages by size, and where the model is cut into these stages."""

    model: SizeModel
    cuts: tuple[str, ...]


def profile_file_sizes(
    path: str, lengths: Sequence[int], rows: Sequence[int], num_stages: int, **how: Any
) -> SizeProfile:
    """Profile the model of a file at each length and number of rows, and fit.

    Args:
        path: As for `load_model_file`; a file with batches of its own makes them by `make_batch(rows, length)`.
        lengths: Tokens per row.
        rows: Rows of a micro-batch.
        num_stages: Stages to cut it into, balanced at the middle length.
        **how: Further arguments of `profile_file`.

    Raises:
        FormatError: The file lacks something, or fails.
        PlacementError: The lengths and rows are fewer than two sizes.
    """
    profiles = {length: profile_file(load_model_file(path, length), rows, **how) for length in sorted(lengths)}
    middle = sorted(lengths)[len(lengths) // 2]
    layers = profiles[middle][max(rows)]
    boundaries = cut(layers, num_stages)
    measured = [
        (Size.padded([length] * number), profile[number].stages(boundaries))
        for length, profile in profiles.items()
        for number in profile
    ]
    return SizeProfile(fit_sizes(measured), layers.cuts_at(boundaries))
