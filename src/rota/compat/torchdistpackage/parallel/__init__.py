"""The modules of `torchdistpackage.parallel`."""
