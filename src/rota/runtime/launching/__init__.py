"""Starting the processes of a run, on one machine or several, watching them, and ending them; needs no torch."""
