"""Kernels for CUDA devices, written in Triton: each file is imported only by who opens it."""
