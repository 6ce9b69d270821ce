"""The description of one forward that kernels, attention backends and models share."""
