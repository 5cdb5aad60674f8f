"""Starting the processes of a run on one machine, watching them, and ending them; needs no torch."""
