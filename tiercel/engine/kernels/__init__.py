"""Kernels for CUDA devices, written in Triton. They are imported only on machines that run them."""
