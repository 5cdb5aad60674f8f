"""`rota demo`: a small GPT on the sources of Python's standard library, planned, trained, compared and explained."""
