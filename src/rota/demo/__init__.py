"""`rota demo`: a small GPT on this machine's own Python sources, from the uncut model to plan against measurement."""
