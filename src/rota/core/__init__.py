"""The nouns, one file each, and the verbs on them: place, check, simulate, device programs and their proof; files.

What a pipeline is: `tasks` (kinds, ops), `cluster`, `costs` (of `layers`, by `sizes`), `placement`, `plan`, `timeline`.
What is done with it: `placing`, `simulation` (on a `taskgraph`; it also checks), `memory`, `programs`.
"""
