"""Local search: moves on the critical path, policies of list scheduling, and windows that CP-SAT reorders."""
