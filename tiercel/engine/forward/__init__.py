"""The description of one forward, shared by kernels, attention backends and models."""
