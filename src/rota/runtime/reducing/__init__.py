"""Gradients over several ranks: tied weights, replicas, stages in FSDP2, and the norm of all of them."""
