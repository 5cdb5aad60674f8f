"""Sizes that the schedules are tried at."""

from support.sampling import IS_WHOLE

MOST_RANKS = 8 if IS_WHOLE else 6


def microbatches(num_ranks: int) -> list[int]:
    """Few, many, and those around one and two for each rank, where the phases of a schedule begin and end."""
    return sorted({1, 2, 24, *range(num_ranks - 1, num_ranks + 2), *range(2 * num_ranks - 1, 2 * num_ranks + 2)} - {0})
