"""Every batch its own plan: from samples' lengths to micro-batches, their order, each rank's schedule, and a bound."""
