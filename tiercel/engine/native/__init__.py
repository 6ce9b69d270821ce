"""Kernels for the CPU in C++: matrix products, paged attention and the operators between them."""
