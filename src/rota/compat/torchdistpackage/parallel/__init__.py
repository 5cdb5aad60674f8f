"""`torchdistpackage.parallel`."""
