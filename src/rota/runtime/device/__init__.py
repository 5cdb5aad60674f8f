"""The hardware under a rank's stages: the CPU, or an accelerator whose kernels streams and events order."""
