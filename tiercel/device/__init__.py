"""The machines: the only room that names CUDA streams, host threads and file descriptors."""
