"""`rota demo`: a small GPT on the sources of Python's standard library, from the whole model to plan against run."""
