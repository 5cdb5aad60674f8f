"""The commands of `rota`, one file each: its options and what it does. Heavy libraries are imported by the function."""
