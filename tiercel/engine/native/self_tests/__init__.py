"""Comparisons of the kernels of a processor class with the portable ones, run when the library is loaded."""
